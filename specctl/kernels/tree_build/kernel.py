"""Growing and cutting a tree in Triton: one program a request.

All sizes of a round are small (a level of 100 candidates, a pool of 300 to 1,000, a tree of 60), so
what counts is the number of launches and the length of the chain of dependent steps, not bytes.
What one thread writes and another reads goes through global memory behind a barrier: it is a few
hundred bytes that never leave the nearest cache.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (arguments are pointers and constants)
from __future__ import annotations

import triton
import triton.language as tl

from specctl.kernels.ranking import best_of, order_bits
from specctl.kernels.tree_build.columns import PAD as _PAD_VALUE
from specctl.kernels.tree_build.columns import ROOT as _ROOT_VALUE

ROOT, PAD = tl.constexpr(_ROOT_VALUE), tl.constexpr(_PAD_VALUE)
LEVEL_SIZES = [
    "pool_row", "frontier_row", "frontier_node", "keep_row", "keep_node",
    "start", "level", "width", "top_k", "num_best",
]  # fmt: skip
TREE_SIZES = ["pool_row", "scores_row", "num_scores", "num_tokens", "num_words", "max_depth"]
"""A size that happens to be 1 or a multiple of 16 must not compile a kernel again mid-request."""


@triton.jit(do_not_specialize=LEVEL_SIZES)
def append_kernel(
    best_index, best_logp,
    token_ids, parent, depth, draft_logp, joint_logp, entropy, topk_entropy,
    sibling_rank, expanded, path_entropy,
    frontier, keep,
    child_ids, child_logp, child_entropy, child_topk_entropy, known,
    pool_row, frontier_row, frontier_node, keep_row, keep_node,
    start, level, width, top_k, num_best,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = row * pool_row
    places = tl.arange(0, BLOCK_C)
    num_children = width * top_k
    here = places < num_children
    node, rank = places // top_k, places % top_k
    source = row * num_children + places
    of_node = row * width + node
    # --- what there is
    up = tl.load(frontier + row * frontier_row + node * frontier_node, mask=here, other=0)
    kept = tl.load(keep + row * keep_row + node * keep_node, mask=here, other=0) != 0
    exists = kept
    if known is not None:
        exists = exists & (tl.load(known + source, mask=here, other=0) != 0)
    token = tl.load(child_ids + source, mask=here, other=0)
    logp = tl.load(child_logp + source, mask=here, other=0.0)
    doubt = tl.load(child_topk_entropy + of_node, mask=here, other=0.0)
    joint = tl.load(joint_logp + base + up, mask=here, other=0.0) + logp
    joint = tl.where(exists, joint, float("-inf"))
    above = tl.load(path_entropy + base + up, mask=here & exists, other=0.0)
    # --- the level, behind the pool
    slot = base + start + places
    tl.store(token_ids + slot, token, mask=here)
    tl.store(parent + slot, tl.where(exists, up, PAD), mask=here)
    tl.store(depth + slot, tl.zeros_like(places) + level, mask=here)
    tl.store(draft_logp + slot, logp, mask=here)
    tl.store(joint_logp + slot, joint, mask=here)
    tl.store(entropy + slot, tl.load(child_entropy + of_node, mask=here, other=0.0), mask=here)
    tl.store(topk_entropy + slot, doubt, mask=here)
    tl.store(path_entropy + slot, doubt + above, mask=here)
    tl.store(sibling_rank + slot, rank, mask=here)
    tl.store(expanded + slot, tl.zeros_like(kept), mask=here)
    tl.store(expanded + base + up, kept, mask=here & (rank == 0))
    # --- the best of it
    place, score, _ = best_of(joint, here, num_best, BLOCK_C, BLOCK_W)
    ranks = tl.arange(0, BLOCK_W)
    found = row * num_best + ranks
    tl.store(best_index + found, start + place, mask=ranks < num_best)
    tl.store(best_logp + found, score, mask=ranks < num_best)


@triton.jit
def _select(
    submitted, scores, limit, min_score, num_scores, num_tokens,
    BLOCK_P: tl.constexpr, RADIX_BITS: tl.constexpr,
):  # fmt: skip
    """Writes a row's best nodes in pool order.

    The score of the last of them is found digit by digit: as many rounds of counting as a float has
    digits, whatever the sizes. Scores above it are in, of those equal to it the earliest.
    """
    slots = tl.arange(0, BLOCK_P)
    score = tl.load(scores + slots, mask=slots < num_scores, other=float("-inf"))
    alive = score > float("-inf")
    if min_score is not None:
        alive = alive & (score >= tl.load(min_score))
    wanted = tl.minimum(num_tokens, tl.sum(alive.to(tl.int32), 0))
    if limit is not None:
        wanted = tl.minimum(wanted, tl.load(limit).to(tl.int32))
    # Unsigned, so that digits count from the top; 0 is below every score.
    key = order_bits(score).to(tl.uint32, bitcast=True) ^ 0x80000000
    key = tl.where(alive, key, 0)
    digits = tl.arange(0, 1 << RADIX_BITS).to(tl.uint32)
    bar = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << (32 - RADIX_BITS), tl.uint32)
    for _ in range(32 // RADIX_BITS):
        bars = bar + digits * step
        reach = tl.sum((key[:, None] >= bars[None, :]).to(tl.int32), 0)
        digit = tl.sum((reach >= wanted).to(tl.int32), 0) - 1
        bar += digit.to(tl.uint32) * step
        step = step >> RADIX_BITS
    above = alive & (key > bar)
    equal = alive & (key == bar)
    room = wanted - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    order = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(submitted + order - 1, slots.to(tl.int64), mask=chosen)
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _slot_of(wanted, nodes, num_tokens, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """Where each wanted pool slot stands among the submitted, -1 for nowhere."""
    found = tl.full((BLOCK_N,), -1, tl.int32)
    for first in range(0, num_tokens, CHUNK):
        slots = first + tl.arange(0, CHUNK)
        node = tl.load(nodes + slots, mask=slots < num_tokens, other=-1).to(tl.int32)
        is_it = (node[None, :] == wanted[:, None]) & (wanted >= 0)[:, None]
        found = tl.maximum(found, tl.max(tl.where(is_it, slots[None, :], -1), 1))
    return found


@triton.jit
def _links(parents, parent, slots, num_tokens, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """First child and next sibling of each node, -1 for none."""
    beyond = 0x7FFFFFFF
    child = tl.full((BLOCK_N,), beyond, tl.int32)
    sibling = tl.full((BLOCK_N,), beyond, tl.int32)
    for first in range(0, num_tokens, CHUNK):
        others = first + tl.arange(0, CHUNK)
        up = tl.load(parents + others, mask=others < num_tokens, other=PAD).to(tl.int32)
        is_child = up[None, :] == slots[:, None]
        is_sibling = (up[None, :] == parent[:, None]) & (parent >= 0)[:, None]
        is_sibling = is_sibling & (others[None, :] > slots[:, None])
        child = tl.minimum(child, tl.min(tl.where(is_child, others[None, :], beyond), 1))
        sibling = tl.minimum(sibling, tl.min(tl.where(is_sibling, others[None, :], beyond), 1))
    return tl.where(child == beyond, -1, child), tl.where(sibling == beyond, -1, sibling)


@triton.jit
def _bit(node, words):
    """The bit of each node in each word; none of a negative node."""
    bit = 1 << (node & 31)
    return tl.where((node >> 5)[:, None] == words, bit[:, None], 0)


@triton.jit
def _ancestors(parents, slots, words, in_row, max_depth):
    """Bits of the nodes on the way up, each node's own too, and where its way ends."""
    seen = _bit(slots, words)
    current, last = slots, slots
    for _ in range(max_depth):
        step = tl.load(parents + current, mask=in_row & (current >= 0), other=-1)
        current = step.to(tl.int32)
        seen = seen | _bit(current, words)
        last = tl.where(current >= 0, current, last)
    return seen, last


@triton.jit(do_not_specialize=TREE_SIZES)
def tree_kernel(
    submitted, out_token, out_parent, out_depth, out_logp, out_position, out_child, out_sibling,
    out_valid, out_count, out_bits,
    token_ids, parent, depth, draft_logp,
    scores, limit, min_score, given, positions,
    pool_row, scores_row, num_scores, num_tokens, num_words, max_depth,
    SELECT: tl.constexpr, LINK: tl.constexpr, RADIX_BITS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_N)
    in_row = slots < num_tokens
    out = row * num_tokens
    if SELECT:
        row_limit = limit
        if limit is not None:
            row_limit = limit + row
        chosen = _select(
            submitted + out, scores + row * scores_row, row_limit, min_score,
            num_scores, num_tokens, BLOCK_P, RADIX_BITS,
        )  # fmt: skip
        nowhere = tl.full((BLOCK_N,), -1, tl.int64)
        tl.store(submitted + out + slots, nowhere, mask=in_row & (slots >= chosen))
        nodes = submitted + out
        tl.debug_barrier()
    else:
        nodes = given + out
    if LINK:
        base = row * pool_row
        index = tl.load(nodes + slots, mask=in_row, other=-1)
        exists = index >= 0
        above = tl.load(parent + base + index, mask=exists, other=PAD).to(tl.int32)
        up = _slot_of(above, nodes, num_tokens, BLOCK_N, CHUNK)
        has_root = tl.max(((slots == 0) & (above == ROOT)).to(tl.int32), 0) > 0
        tl.store(out_parent + out + slots, up.to(tl.int64), mask=in_row)
        tl.debug_barrier()
        # --- up to the root, all nodes at once, some words of bits at a time
        end = slots  # where each node's way ends; the same for every group of words
        for first_word in range(0, num_words, BLOCK_WORDS):
            words = (first_word + tl.arange(0, BLOCK_WORDS))[None, :]
            seen, end = _ancestors(out_parent + out, slots, words, in_row, max_depth)
            closed = exists & (end == 0) & has_root
            seen = tl.where(closed[:, None], seen, _bit(slots, words))
            at = (out + slots)[:, None] * num_words + words
            tl.store(out_bits + at, seen, mask=in_row[:, None] & (words < num_words))
        closed = exists & (end == 0) & has_root
        up = tl.where(closed, up, PAD)
        tl.debug_barrier()
        tl.store(out_parent + out + slots, up.to(tl.int64), mask=in_row)
        tl.store(submitted + out + slots, tl.where(closed, index, -1), mask=in_row)
        tl.debug_barrier()
        child, sibling = _links(out_parent + out, up, slots, num_tokens, BLOCK_N, CHUNK)
        # --- what verification reads
        level = tl.load(depth + base + index, mask=closed, other=0)
        first = tl.zeros((), tl.int64)
        if positions is not None:
            first += tl.load(positions + row)
        token = tl.load(token_ids + base + index, mask=closed, other=0)
        logp = tl.load(draft_logp + base + index, mask=closed, other=0.0)
        tl.store(out_token + out + slots, token, mask=in_row)
        tl.store(out_depth + out + slots, level, mask=in_row)
        tl.store(out_logp + out + slots, logp, mask=in_row)
        tl.store(out_position + out + slots, first + level, mask=in_row)
        tl.store(out_child + out + slots, child.to(tl.int64), mask=in_row)
        tl.store(out_sibling + out + slots, sibling.to(tl.int64), mask=in_row)
        tl.store(out_valid + out + slots, closed, mask=in_row)
        tl.store(out_count + row, tl.sum(closed.to(tl.int64), 0))
