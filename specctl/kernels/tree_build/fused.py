"""Triton kernels of `tree_build`: one program a request, one launch an op.

All sizes of a round are small (a level of 100 candidates, a pool of 300 to 1,000, a tree of 60), so
the number of launches and the length of the chain of dependent steps count, not bytes. What one
thread writes and another reads goes through global memory behind a barrier: it is a few hundred
bytes that never leave the nearest cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.checks import block_of, ceil_div, dense_rows, require_at_most
from specctl.kernels.ordering import best_of, order_bits
from specctl.kernels.tree_build import WORD_BITS, Best, BuiltTree
from specctl.tree import PAD as _PAD
from specctl.tree import ROOT as _ROOT
from specctl.tree import Children, DraftPool

LEVEL_WARPS: dict[int, int] = {16: 1, 128: 2, 256: 4, 1024: 8}
"""Warps by candidates of a level."""
BEST_BLOCKS = (16, 64)
POOL_WARPS: dict[int, int] = {512: 4, 1024: 8, 4096: 16}
TREE_WARPS: dict[int, int] = {64: 2, 256: 4, 1024: 16}
"""Warps by slots of the pool, and of the tree."""
LINK_CHUNK = 8
"""Nodes that all nodes of a tree are compared with at a time; Triton 3.6 and 3.7 do not spill."""
ROOT, PAD = tl.constexpr(_ROOT), tl.constexpr(_PAD)
LEVEL_SIZES = [
    "pool_row", "frontier_row", "frontier_node", "keep_row", "keep_node",
    "start", "level", "width", "top_k", "num_best",
]  # fmt: skip
SELECT_SIZES = ["scores_row", "num_scores", "num_tokens"]
LINK_SIZES = ["pool_row", "num_tokens", "num_words", "max_depth"]
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
    # --- inputs
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


@triton.jit(do_not_specialize=SELECT_SIZES)
def select_kernel(
    submitted, scores, limit, min_score, scores_row, num_scores, num_tokens,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, RADIX_BITS: tl.constexpr,
):  # fmt: skip
    """Writes a row's best nodes in pool order.

    The score of the last of them is found digit by digit: as many rounds of counting as a float has
    digits, whatever the sizes. Scores above it are in, of those equal to it the earliest.
    """
    row = tl.program_id(0).to(tl.int64)
    submitted += row * num_tokens
    slots = tl.arange(0, BLOCK_P)
    score = tl.load(scores + row * scores_row + slots, mask=slots < num_scores, other=float("-inf"))
    alive = score > float("-inf")
    if min_score is not None:
        alive = alive & (score >= tl.load(min_score))
    wanted = tl.minimum(num_tokens, tl.sum(alive.to(tl.int32), 0))
    if limit is not None:
        wanted = tl.minimum(wanted, tl.load(limit + row).to(tl.int32))
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
    places = tl.arange(0, BLOCK_N)
    nowhere = tl.full((BLOCK_N,), -1, tl.int64)
    is_empty = (places >= tl.sum(chosen.to(tl.int32), 0)) & (places < num_tokens)
    tl.store(submitted + places, nowhere, mask=is_empty)


@triton.jit
def _slot_of(wanted, nodes, num_tokens, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """Place of each wanted pool slot among the submitted, -1 for none."""
    found = tl.full((BLOCK_N,), -1, tl.int32)
    for first in range(0, num_tokens, CHUNK):
        slots = first + tl.arange(0, CHUNK)
        node = tl.load(nodes + slots, mask=slots < num_tokens, other=-1).to(tl.int32)
        is_it = (node[None, :] == wanted[:, None]) & (wanted >= 0)[:, None]
        found = tl.maximum(found, tl.max(tl.where(is_it, slots[None, :], -1), 1))
    return found


@triton.jit
def _bit(node, words):
    """The bit of each node in each word; none of a negative node."""
    bit = 1 << (node & 31)
    return tl.where((node >> 5)[:, None] == words, bit[:, None], 0)


@triton.jit
def _ancestors(parents, slots, words, in_row, max_depth):
    """Bits of the nodes on the way up, each node's own too, and the last node of the way."""
    seen = _bit(slots, words)
    current, last = slots, slots
    for _ in range(max_depth):
        step = tl.load(parents + current, mask=in_row & (current >= 0), other=-1)
        current = step.to(tl.int32)
        seen = seen | _bit(current, words)
        last = tl.where(current >= 0, current, last)
    return seen, last


@triton.jit(do_not_specialize=LINK_SIZES)
def link_kernel(
    submitted, out_token, out_parent, out_depth, out_logp, out_position,
    out_valid, out_count, out_bits,
    token_ids, parent, depth, draft_logp, given, positions,
    pool_row, num_tokens, num_words, max_depth,
    BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_N)
    in_row = slots < num_tokens
    out = row * num_tokens
    nodes = given + out
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
    tl.store(out_valid + out + slots, closed, mask=in_row)
    tl.store(out_count + row, tl.sum(closed.to(tl.int64), 0))


def append_level(
    pool: DraftPool, frontier: Tensor, keep: Tensor, children: Children,
    start: int, depth: int, num_best: int,
) -> Best:  # fmt: skip
    rows, width, top_k = children.token_ids.shape
    require_at_most("append_level", "candidates of a level", width * top_k, max(LEVEL_WARPS))
    require_at_most("append_level", "num_best", num_best, max(BEST_BLOCKS))
    index = frontier.new_empty(rows, num_best)
    best = Best(index, torch.empty(index.shape, device=index.device))
    if rows:
        block = block_of(LEVEL_WARPS, width * top_k)
        given = (None if part is None else part.contiguous() for part in children)
        sizes = (start, depth, width, top_k, num_best)
        strides = (pool.parent.stride(0), *frontier.stride(), *keep.stride())
        append_kernel[(rows,)](
            *best, *pool[:-1], frontier, keep, *given, *strides, *sizes,
            BLOCK_C=block, BLOCK_W=block_of(BEST_BLOCKS, num_best), num_warps=LEVEL_WARPS[block],
        )  # fmt: skip
    return best


def select_nodes(
    scores: Tensor, num_tokens: int, limit: Tensor | None, min_score: Tensor | None
) -> Tensor:
    scores = dense_rows(scores)
    rows, num_scores = scores.shape
    require_at_most("select_nodes", "slots of the pool", num_scores, max(POOL_WARPS))
    require_at_most("select_nodes", "num_tokens", num_tokens, max(TREE_WARPS))
    submitted = torch.empty(rows, num_tokens, dtype=torch.int64, device=scores.device)
    if rows:
        block, nodes = block_of(POOL_WARPS, num_scores), block_of(TREE_WARPS, num_tokens)
        select_kernel[(rows,)](
            submitted, scores, None if limit is None else limit.contiguous(), min_score,
            scores.stride(0), num_scores, num_tokens,
            BLOCK_P=block, BLOCK_N=nodes,
            RADIX_BITS=2 if block > 1024 else 4,  # all slots are compared with all digits at once
            num_warps=POOL_WARPS[block],
        )  # fmt: skip
    return submitted


def link_tree(
    pool: DraftPool, submitted: Tensor, max_depth: int, positions: Tensor | None
) -> BuiltTree:
    rows, num_tokens = submitted.shape
    require_at_most("link_tree", "num_tokens", num_tokens, max(TREE_WARPS))
    num_words = ceil_div(num_tokens, WORD_BITS)
    column = submitted.new_empty
    built = BuiltTree(
        *(column(rows, num_tokens) for _ in range(4)),
        torch.empty(rows, num_tokens, device=submitted.device),
        column(rows, num_tokens),
        column(rows, num_tokens, dtype=torch.bool),
        column(rows),
        column(rows, num_tokens, num_words, dtype=torch.int32),
    )
    if rows and num_tokens:
        block = block_of(TREE_WARPS, num_tokens)
        link_kernel[(rows,)](
            *built, pool.token_ids, pool.parent, pool.depth, pool.draft_logp,
            submitted.contiguous(), None if positions is None else positions.contiguous(),
            pool.parent.stride(0), num_tokens, num_words, max_depth,
            BLOCK_N=block, BLOCK_WORDS=min(block // WORD_BITS, 8), CHUNK=LINK_CHUNK,
            num_warps=TREE_WARPS[block],
        )  # fmt: skip
    return built
