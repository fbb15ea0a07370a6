"""Triton kernels of `tree_attention`: splits of the keys side by side, then their merge.

A program holds one tile of a request's queries, nodes times the query heads that share a key head,
and walks one split of that request's keys: blocks of the prefix without a mask, then in words of 32
entries the rest of the prefix, and the tail under its bits.

Splits follow the requests' lengths, which are read on the device: the grid has a fixed number of
slots, and every program computes which request and which of its splits its slot holds. So one long
request among short ones is spread over the chip, a launch can be captured and replayed, and nothing
waits for the device. A request of one split writes its result at once; the others write partial
means, which a second kernel merges.

The table of tiles follows registers and shared memory as compiled (`tests/kernels/test_aot.py`) and
the counts of the chip; it was not measured on a GPU yet.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.checks import FLOATS, ceil_div, require_tensor

LOG2_E = 1.4426950408889634
MAX_SPLITS = 32
"""Of a request."""


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


@triton.jit
def _split_counts(
    prefixes, offsets, behind, num_requests, num_slots, ENTRIES: tl.constexpr, ROWS: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Splits of every request, and the slots up to its last: one share of blocks for all.

    Rounding up takes less than one slot a request, so that the slots suffice.
    """
    rows = tl.arange(0, ROWS)
    is_row = rows < num_requests
    first = tl.load(offsets + rows, mask=is_row, other=0).to(tl.int32)
    num_nodes = tl.load(offsets + rows + 1, mask=is_row, other=0).to(tl.int32) - first
    prefix = tl.load(prefixes + rows, mask=is_row, other=0).to(tl.int32)
    blocks = tl.cdiv(prefix, ENTRIES) + tl.cdiv(behind + num_nodes, ENTRIES)
    blocks = tl.where(num_nodes > 0, blocks, 0)
    share = tl.maximum(tl.cdiv(tl.sum(blocks, 0), num_slots - num_requests + 1), 1)
    splits = tl.minimum(tl.cdiv(blocks, share), MOST)
    return splits, tl.cumsum(splits, 0)


@triton.jit
def _clear(out, first, num_tokens, tile, head, dims, HEADS: tl.constexpr, GROUP: tl.constexpr,
           DIM: tl.constexpr, QUERIES: tl.constexpr):  # fmt: skip
    """Zeros for the tokens of no request; tiles take turns."""
    num_rows = (num_tokens - first) * GROUP
    for start in range(tile * QUERIES, num_rows, tl.num_programs(0) * QUERIES):
        row = start + tl.arange(0, QUERIES)
        place = (first + row // GROUP).to(tl.int64) * HEADS + head * GROUP + row % GROUP
        nothing = tl.zeros([QUERIES, dims.shape[0]], out.dtype.element_ty)
        at = out + place[:, None] * DIM + dims[None, :]
        tl.store(at, nothing, mask=(row < num_rows)[:, None] & (dims < DIM)[None, :])


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_words", "behind", "num_requests", "num_slots", "max_nodes",
    ],
    do_not_specialize_on_alignment=["prefixes", "offsets", "ancestors"],
)  # fmt: skip
def attend_kernel(
    query, keys, values, prefixes, offsets, ancestors, out, partial, lse, scale,
    num_tokens, num_words, behind, num_requests, num_slots, max_nodes,
    query_token, query_head, key_slot, key_head, value_slot, value_head,
    KEY_ENTRY: tl.constexpr, VALUE_ENTRY: tl.constexpr,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    QUERIES: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of a request's queries over one split of its keys."""
    tile, slot, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dims = tl.arange(0, PADDED_DIM)
    if slot == num_slots:
        end_of_all = tl.load(offsets + num_requests).to(tl.int32)
        _clear(out, end_of_all, num_tokens, tile, head, dims, KEY_HEADS * GROUP, GROUP, DIM,
               QUERIES)  # fmt: skip
        return
    request, split, num_splits = slot, 0, 1
    if IS_SPLIT:
        rows = tl.arange(0, ROWS)
        splits, ends = _split_counts(
            prefixes, offsets, behind, num_requests, num_slots, ENTRIES, ROWS, MOST
        )
        request = tl.sum(((ends <= slot) & (rows < num_requests)).to(tl.int32), 0)
        if request >= num_requests:
            return
        split = slot - tl.sum(tl.where(rows == request, ends - splits, 0), 0)
        num_splits = tl.sum(tl.where(rows == request, splits, 0), 0)
    first = tl.load(offsets + request).to(tl.int32)
    num_nodes = tl.load(offsets + request + 1).to(tl.int32) - first
    if tile * QUERIES >= num_nodes * GROUP:
        return
    prefix = tl.load(prefixes + request).to(tl.int32)

    row = tile * QUERIES + tl.arange(0, QUERIES)
    is_row = row < num_nodes * GROUP
    token, query_of_head = first + row // GROUP, head * GROUP + row % GROUP
    q_at = token * query_token + query_of_head * query_head
    q = _rows(query, q_at, is_row, dims, DIM, False)
    at_request = request.to(tl.int64)
    k_base = keys + at_request * key_slot + head.to(tl.int64) * key_head
    v_base = values + at_request * value_slot + head.to(tl.int64) * value_head

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

    # Where nothing was seen the mean is 0. A NaN stays: maxima drop it on a GPU, sums do not.
    total = tl.where(total == 0, 1.0, total)
    mean = mean / total[:, None]
    place = token.to(tl.int64) * (KEY_HEADS * GROUP) + query_of_head
    is_out = is_row[:, None] & (dims < DIM)[None, :]
    at = out + place[:, None] * DIM + dims[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=is_out & (num_splits == 1))
    if IS_SPLIT:
        is_part = num_splits > 1
        place = slot.to(tl.int64) * max_nodes + row // GROUP
        place = place * (KEY_HEADS * GROUP) + query_of_head
        at = partial + place[:, None] * DIM + dims[None, :]
        tl.store(at, mean, mask=is_out & is_part & (start < end))
        tl.store(lse + place, peak + tl.log2(total), mask=is_row & is_part)


@triton.jit(
    do_not_specialize=["behind", "num_requests", "num_slots", "max_nodes"],
    do_not_specialize_on_alignment=["prefixes", "offsets"],
)
def merge_kernel(
    partial, lse, prefixes, offsets, out, behind, num_requests, num_slots, max_nodes,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    ENTRIES: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The queries of one token that share a key head: the splits' means, weighted by their sums."""
    token, head = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, ROWS)
    row_ends = tl.load(offsets + 1 + rows, mask=rows < num_requests, other=0x7FFFFFFF)
    request = tl.sum((row_ends <= token).to(tl.int32), 0)
    if request >= num_requests:
        return
    splits, ends = _split_counts(
        prefixes, offsets, behind, num_requests, num_slots, ENTRIES, ROWS, MOST
    )
    num_splits = tl.sum(tl.where(rows == request, splits, 0), 0)
    if num_splits == 1:
        return
    first_slot = tl.sum(tl.where(rows == request, ends - splits, 0), 0).to(tl.int64)
    node = token - tl.load(offsets + request).to(tl.int32)
    of_head, dims = tl.arange(0, GROUP_BLOCK), tl.arange(0, PADDED_DIM)
    is_head, is_dim = of_head < GROUP, dims < DIM
    query_head = head * GROUP + of_head
    split = tl.arange(0, MOST)
    place = ((first_slot + split) * max_nodes + node)[:, None] * (KEY_HEADS * GROUP) + query_head
    is_part = (split < num_splits)[:, None] & is_head[None, :]
    peak = tl.max(tl.load(lse + place, mask=is_part, other=float("-inf")), 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    mean = tl.zeros([GROUP_BLOCK, PADDED_DIM], tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    for each in range(num_splits):
        part_at = ((first_slot + each) * max_nodes + node) * (KEY_HEADS * GROUP) + query_head
        found = tl.load(lse + part_at, mask=is_head, other=float("-inf"))
        # A split without entries wrote no mean.
        is_mean = (is_head & (found != float("-inf")))[:, None] & is_dim[None, :]
        part = tl.load(partial + part_at[:, None] * DIM + dims[None, :], mask=is_mean, other=0.0)
        weight = tl.exp2(found - peak)
        mean += part * weight[:, None]
        total += weight
    mean = mean / tl.where(total == 0, 1.0, total)[:, None]
    place = tl.cast(token, tl.int64) * (KEY_HEADS * GROUP) + query_head
    at = out + place[:, None] * DIM + dims[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=is_head[:, None] & is_dim[None, :])


# --------------------------------------------------------------------------- cutting


class Tiles(NamedTuple):
    """A tuned configuration."""

    rows: int
    """Taken up to so many queries of a request, each node counted once a head of its group."""
    queries: int  # of a program
    entries: int  # of a block of keys
    num_warps: int
    num_stages: int


_ANY = 1 << 31
NARROW = (Tiles(16, 16, 64, 4, 3), Tiles(64, 64, 64, 4, 3), Tiles(_ANY, 128, 64, 8, 3))
"""Two bytes a number, heads of up to 128, matrix units that read shared memory."""
NARROW_AMPERE = (Tiles(16, 16, 64, 4, 3), Tiles(_ANY, 64, 32, 4, 3))
"""The same where operands live in registers and shared memory is less: all other chips."""
WIDE = (Tiles(_ANY, 32, 32, 4, 2),)
"""Two bytes a number, heads of up to 256. Tiles of 64 queries spill under Triton 3.6."""
FLOAT32 = (Tiles(_ANY, 16, 32, 4, 2),)
"""Exact products leave no room for more; this is the width of tests, not of serving."""


def tiles_for(num_rows: int, head_dim: int, dtype: torch.dtype, generation: int) -> Tiles:
    """The first configuration with room for a request's queries.

    Args:
        num_rows: nodes at capacity times query heads a key head.
        generation: major compute capability: 8 Ampere, 9 Hopper, 10 Blackwell.
    """
    table: tuple[Tiles, ...]
    if dtype == torch.float32:
        table = FLOAT32
    elif head_dim > 128:
        table = WIDE
    else:
        table = NARROW if generation in (9, 10) else NARROW_AMPERE
    return next(tiles for tiles in table if num_rows <= tiles.rows)


def padded_dim(head_dim: int) -> int:
    """The next power of two, which a matrix unit takes; 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


@lru_cache(maxsize=1024)
def num_splits_for(num_tiles: int, most: int, num_sms: int) -> int:
    """The fewest splits of the keys that fill the last wave of programs nearly as well as any.

    Args:
        num_tiles: programs without splitting. most: blocks of keys, or a limit below.
    """

    def filled(splits: int) -> float:
        return num_tiles * splits / num_sms / ceil_div(num_tiles * splits, num_sms)

    if 5 * num_tiles >= 4 * num_sms:  # a merge would cost more than the idle ones
        return 1
    choices = range(1, most + 1)
    best = max(map(filled, choices))
    return next(splits for splits in choices if filled(splits) >= 0.85 * best)


class Chip(NamedTuple):
    """The properties of a GPU that the cut depends on."""

    num_sms: int
    generation: int


H200 = Chip(132, 9)
"""Stands in where there is no chip: the interpreter."""


@lru_cache(maxsize=8)
def chip_of(device: torch.device) -> Chip:
    """The chip of a device, read once."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, found.major)


def num_slots_for(
    num_rows: int, num_tokens: int, capacity: int, num_tiles: int, group: int, key_heads: int,
    tiles: Tiles, num_sms: int,
) -> int:  # fmt: skip
    """Splits of all requests together.

    Enough that requests of equal length fill the chip, and that one long request among short ones
    is cut as finely as it would be alone.

    Args:
        num_rows: B. num_tokens: T. capacity: entries of a slot. num_tiles: of a full request.
    """
    most = min(MAX_SPLITS, ceil_div(capacity, tiles.entries))
    live = min(num_rows * num_tiles, num_rows + num_tokens * group // tiles.queries)
    even = num_splits_for(live * key_heads, most, num_sms)
    alone = num_splits_for(num_tiles * key_heads, most, num_sms)
    return max(num_rows * even, num_rows + alone - 1)


def tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, prefixes: Tensor, offsets: Tensor,
    ancestors: Tensor, *, scaling: float, max_nodes: int, behind: int,
    tiles: Tiles | None = None, num_slots: int | None = None,
) -> Tensor:  # fmt: skip
    """See `specctl.kernels.tree_attention`; `tiles` and `num_slots` are for benchmarks."""
    require_tensor("tree_attention", "query", query, (None, None, None), *FLOATS)
    (num_tokens, heads, dim), (rows, key_heads, capacity, _) = query.shape, keys.shape
    group, chip = heads // key_heads, chip_of(query.device)
    if tiles is None:
        tiles = tiles_for(max_nodes * group, dim, query.dtype, chip.generation)
    num_tiles = ceil_div(max_nodes * group, tiles.queries)
    if num_slots is None:
        num_slots = num_slots_for(
            rows, num_tokens, capacity, num_tiles, group, key_heads, tiles, chip.num_sms
        )
    out = query.new_empty(num_tokens, heads, dim)
    is_split = num_slots > rows
    partial = lse = None
    if is_split:
        partial = query.new_empty(num_slots, max_nodes, heads, dim, dtype=torch.float32)
        lse = query.new_empty(num_slots, max_nodes, heads, dtype=torch.float32)
    shapes = {
        "KEY_HEADS": key_heads, "GROUP": group, "DIM": dim, "PADDED_DIM": padded_dim(dim),
        "ENTRIES": tiles.entries, "ROWS": triton.next_power_of_2(rows), "MOST": MAX_SPLITS,
    }  # fmt: skip
    attend_kernel[(num_tiles, num_slots + 1, key_heads)](
        query, keys, values, prefixes, offsets, ancestors, out, partial, lse, scaling * LOG2_E,
        num_tokens, ancestors.shape[1], behind, rows, num_slots, max_nodes,
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        KEY_ENTRY=keys.stride(2), VALUE_ENTRY=values.stride(2), QUERIES=tiles.queries,
        IS_SPLIT=is_split, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **shapes,
    )  # fmt: skip
    if is_split:
        merge_kernel[(num_tokens, key_heads)](
            partial, lse, prefixes, offsets, out, behind, rows, num_slots, max_nodes,
            GROUP_BLOCK=triton.next_power_of_2(group), num_warps=4, **shapes,
        )  # fmt: skip
    return out
