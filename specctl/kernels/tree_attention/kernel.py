"""The two kernels of `tree_attention`; `fused.py` says how they share the work."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (arguments are pointers and constants)

from __future__ import annotations

import triton
import triton.language as tl

WORD = tl.constexpr(32)
"""Tail entries of a step: one word of bits a query."""


@triton.jit
def _rows(base, row, is_row, dims, DIM: tl.constexpr, ALL: tl.constexpr):
    """Vectors of DIM numbers, padded with 0; `is_row` is not read where ALL are."""
    at = base + row[:, None] + dims[None, :]
    if ALL:
        if dims.shape[0] == DIM:
            found = tl.load(at)
        else:
            found = tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    else:
        if dims.shape[0] == DIM:
            found = tl.load(at, mask=is_row[:, None], other=0.0)
        else:
            found = tl.load(at, mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0)
    return found


@triton.jit
def _absorb(q, k, v, seen, scale, mean, peak, total, ALL: tl.constexpr):
    """One block of entries into the running softmax, base 2; `seen` is not read where ALL are."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if not ALL:
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    # A query that has seen nothing yet would subtract infinity from itself.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(peak - shift)
    mean = tl.dot(weights.to(v.dtype), v, mean * kept[:, None], input_precision="ieee")
    return mean, highest, total * kept + tl.sum(weights, 1)


@triton.jit(
    do_not_specialize=["num_tokens", "num_words", "behind", "num_splits"],
    do_not_specialize_on_alignment=["prefixes", "offsets", "ancestors"],
)
def attend(
    query, keys, values, prefixes, offsets, ancestors, out, lse, scale,
    num_tokens, num_words, behind, num_splits,
    query_token, query_head, key_slot, key_head, value_slot, value_head,
    KEY_ENTRY: tl.constexpr, VALUE_ENTRY: tl.constexpr,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    QUERIES: tl.constexpr, ENTRIES: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of a request's queries over one split of its keys."""
    tile, split = tl.program_id(0), tl.program_id(1)
    request, head = tl.program_id(2) // KEY_HEADS, tl.program_id(2) % KEY_HEADS
    first = tl.load(offsets + request).to(tl.int32)
    num_nodes = tl.load(offsets + request + 1).to(tl.int32) - first
    if tile * QUERIES >= num_nodes * GROUP:
        return
    prefix = tl.load(prefixes + request).to(tl.int32)

    row = tile * QUERIES + tl.arange(0, QUERIES)
    is_row = row < num_nodes * GROUP
    token, query_of_head = first + row // GROUP, head * GROUP + row % GROUP
    dims = tl.arange(0, PADDED_DIM)
    q_at = token * query_token + query_of_head * query_head
    q = _rows(query, q_at, is_row, dims, DIM, False)
    slot = request.to(tl.int64)
    k_base = keys + slot * key_slot + head.to(tl.int64) * key_head
    v_base = values + slot * value_slot + head.to(tl.int64) * value_head

    mean = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    entry = tl.arange(0, ENTRIES)

    # Blocks are counted through prefix and tail, so that splits are even whatever their shares.
    num_tail = behind + num_nodes
    num_whole, num_prefix = prefix // ENTRIES, tl.cdiv(prefix, ENTRIES)
    num_blocks = num_prefix + tl.cdiv(num_tail, ENTRIES)
    share = tl.cdiv(num_blocks, num_splits)
    start = split * share
    end = tl.minimum(start + share, num_blocks)

    for block in range(start, tl.minimum(end, num_whole)):
        at = tl.cast(block, tl.int64) * ENTRIES
        k = _rows(k_base + at * KEY_ENTRY, entry * KEY_ENTRY, entry, dims, DIM, True)
        v = _rows(v_base + at * VALUE_ENTRY, entry * VALUE_ENTRY, entry, dims, DIM, True)
        mean, peak, total = _absorb(q, k, v, entry, scale, mean, peak, total, True)

    # Then words of 32 entries: first what the last whole block left of the prefix, then the tail.
    has_rest = (start <= num_whole) & (num_whole < end)
    rest_start = num_whole * ENTRIES
    rest_words = tl.where(has_rest, tl.cdiv(prefix - rest_start, WORD), 0)
    tail_start = tl.maximum(start - num_prefix, 0) * ENTRIES
    tail_end = tl.minimum((end - num_prefix) * ENTRIES, num_tail)
    tail_words = tl.cdiv(tl.maximum(tail_end - tail_start, 0), WORD)
    bit = tl.arange(0, WORD)
    for word in range(rest_words + tail_words):
        in_tail = word >= rest_words
        behind_prefix = tail_start + (word - rest_words) * WORD
        at = tl.where(in_tail, prefix + behind_prefix, rest_start + word * WORD)
        is_entry = at + bit < tl.where(in_tail, prefix + num_tail, prefix)
        at = at.to(tl.int64)
        k = _rows(k_base + at * KEY_ENTRY, bit * KEY_ENTRY, is_entry, dims, DIM, False)
        v = _rows(v_base + at * VALUE_ENTRY, bit * VALUE_ENTRY, is_entry, dims, DIM, False)
        word_at = ancestors + token * num_words + behind_prefix // WORD
        words = tl.load(word_at, mask=is_row & in_tail, other=-1)  # all see the prefix
        seen = (((words[:, None] >> bit[None, :]) & 1) != 0) & is_entry[None, :]
        mean, peak, total = _absorb(q, k, v, seen, scale, mean, peak, total, False)

    total = tl.where(total > 0, total, 1.0)  # where nothing was seen, the mean is 0
    mean = mean / total[:, None]
    place = (split * num_tokens + token).to(tl.int64) * (KEY_HEADS * GROUP) + query_of_head
    at = out + place[:, None] * DIM + dims[None, :]
    is_out = is_row[:, None] & (dims < DIM)[None, :]
    if IS_SPLIT:
        tl.store(at, mean, mask=is_out & (start < end))
        tl.store(lse + place, peak + tl.log2(total), mask=is_row)
    else:
        tl.store(at, mean.to(out.dtype.element_ty), mask=is_out)


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "num_splits"],
    do_not_specialize_on_alignment=["offsets"],
)
def merge(
    partial, lse, offsets, out, num_tokens, num_requests, num_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One query: the splits' means, weighted by what they saw."""
    row = tl.program_id(0)
    split, dims = tl.arange(0, SPLITS), tl.arange(0, PADDED_DIM)
    is_split = split < num_splits
    place = split.to(tl.int64) * (num_tokens * HEADS) + row
    # All loads leave at once; what no program wrote is put aside afterwards.
    found = tl.load(lse + place, mask=is_split, other=float("-inf"))
    is_part = is_split[:, None] & (dims < DIM)[None, :]
    means = tl.load(partial + place[:, None] * DIM + dims[None, :], mask=is_part, other=0.0)
    is_token = row < tl.load(offsets + num_requests).to(tl.int32) * HEADS
    found = tl.where(is_token, found, float("-inf"))
    peak = tl.max(found, 0)
    weights = tl.exp2(found - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    means = tl.where((weights > 0)[:, None], means, 0.0)
    mean = tl.sum(means * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    at = out + row.to(tl.int64) * DIM + dims
    tl.store(at, mean.to(out.dtype.element_ty), mask=dims < DIM)
