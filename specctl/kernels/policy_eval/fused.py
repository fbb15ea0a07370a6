"""Triton kernels of `policy_eval`, one launch an op.

The header is read on the device: it may differ from launch to launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.checks import block_of, ceil_div, require_at_most
from specctl.kernels.ordering import best_of, order_bits
from specctl.kernels.policy_eval import Bins, GateState, Pruned, layout
from specctl.kernels.policy_eval.layout import PolicyBuffer
from specctl.kernels.tree_build import Best
from specctl.tree import PAD as _PAD
from specctl.tree import DraftPool

GATE_BLOCKS: dict[int, int] = {16: 4, 256: 8}
"""Warps by rows of a program: few for a batch, many for a table."""
MANY_ROWS = 4096
POOL_WARPS: dict[int, int] = {1024: 4, 4096: 8}
LEVEL_WARPS: dict[int, int] = {16: 1, 128: 4, 256: 4, 1024: 8}
"""Warps by slots of the pool, and by candidates of a level."""
HIDDEN_BLOCK: dict[int, int] = {16: 16, 128: 16, 256: 16, 1024: 8}
"""Hidden units at a time, by candidates: as many as registers hold in float64."""
BEST_BLOCKS = (16, 64)
PAD = tl.constexpr(_PAD)
FIRST_DEPTH, NUM_EDGES, CONDITIONAL = map(
    tl.constexpr, (layout.FIRST_DEPTH, layout.NUM_EDGES, layout.CONDITIONAL)
)
NUM_FEATURES, NUM_HIDDEN, COMBINE, KEEP_LEAVES, FEATURES = map(
    tl.constexpr,
    (layout.NUM_FEATURES, layout.NUM_HIDDEN, layout.COMBINE, layout.KEEP_LEAVES, layout.FEATURES),
)
EDGES, BIN_DEPTHS, BIN_TOKENS, BARS, MIN_SCORE = map(
    tl.constexpr,
    (layout.EDGES, layout.BIN_DEPTHS, layout.BIN_TOKENS, layout.BARS, layout.MIN_SCORE),
)
W1, B1, W2, B2 = map(tl.constexpr, (layout.W1, layout.B1, layout.W2, layout.B2))
MAX_HIDDEN = tl.constexpr(layout.MAX_HIDDEN)
EDGE_BLOCK = tl.constexpr(layout.MAX_EDGES + 1)
POOL_SIZES = ["pool_row", "num_slots"]
GATE_SIZES = ["num_rows", "num_slots", "order_row", "level", "width", "num_best"]
PRUNE_SIZES = [
    "pool_row", "scores_row", "start", "level", "num_nodes", "top_k", "num_parents", "num_best",
]  # fmt: skip
"""A size that happens to be 1 or a multiple of 16 must not compile a kernel again mid-request."""


@triton.jit(do_not_specialize=POOL_SIZES)
def bin_kernel(
    bins, max_depth, num_tokens, value_out,
    parent, depth, draft_logp, joint_logp, path_entropy, header, words,
    pool_row, num_slots,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = row * pool_row
    slots = tl.arange(0, BLOCK_P)
    real = slots < num_slots
    up = tl.load(parent + base + slots, mask=real, other=PAD)
    level = tl.load(depth + base + slots, mask=real, other=-1).to(tl.int32)
    level = tl.where(up == PAD, -1, level)
    by_condition = tl.load(header + CONDITIONAL) != 0
    joint = tl.load(joint_logp + base + slots, mask=real, other=float("-inf"))
    own = tl.load(draft_logp + base + slots, mask=real & by_condition, other=float("-inf"))
    score = tl.where(by_condition, own, joint)
    score = tl.where(level == tl.max(level, 0), score, float("-inf"))
    # The first of the highest, which is slot 0 where all are -inf; slots beyond the pool are none.
    key = (order_bits(score).to(tl.int64) << 32) | (BLOCK_P - 1 - slots).to(tl.int64)
    key = tl.where(real, key, -0x8000000000000000)
    end = BLOCK_P - 1 - (tl.max(key, 0) & 0xFFFFFFFF).to(tl.int32)
    value = tl.load(path_entropy + base + end)
    # --- its bin: `not >=` rather than `<`, so that NaN goes to the last
    place, num_edges = tl.arange(0, EDGE_BLOCK), tl.load(header + NUM_EDGES)
    edge = tl.load(words + EDGES + place, mask=place < num_edges, other=0.0)
    is_left = (edge >= value) | (place >= num_edges)
    found = tl.sum(tl.where(is_left, 0, 1), 0)
    tl.store(bins + row, found.to(tl.int64))
    tl.store(max_depth + row, tl.load(header + BIN_DEPTHS + found).to(tl.int64))
    tl.store(num_tokens + row, tl.load(header + BIN_TOKENS + found).to(tl.int64))
    tl.store(value_out + row, value)


@triton.jit(do_not_specialize=GATE_SIZES)
def gate_kernel(
    keep, max_depth, stopped_at, num_kept, order, best_index, best_logp, header, words,
    num_rows, num_slots, order_row, level, width, num_best,
    IS_FIRST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = rows < num_rows
    ranks = tl.arange(0, BLOCK_W)[None, :]
    places = rows[:, None] * num_best + ranks
    here = real[:, None] & (ranks < num_best)
    score = tl.load(best_logp + places, mask=here, other=float("-inf"))
    index = tl.load(best_index + places, mask=here, other=0)
    confidence = tl.load(best_logp + rows * num_best, mask=real, other=float("-inf"))
    closed = (confidence < tl.load(words + BARS + level)) & (confidence > float("-inf"))
    if IS_FIRST:
        deepest = tl.zeros((BLOCK_R,), tl.int64) + tl.load(header + FIRST_DEPTH)
        stopped = tl.zeros((BLOCK_R,), tl.int64)
        count = tl.zeros((BLOCK_R,), tl.int64)
        for first in range(0, num_slots, BLOCK_W):
            slots = first + ranks
            fill = tl.where(slots == 0, 0.0, float("-inf")) + tl.zeros((BLOCK_R, 1), tl.float32)
            at = rows[:, None] * order_row + slots
            tl.store(order + at, fill, mask=real[:, None] & (slots < num_slots))
    else:
        deepest = tl.load(max_depth + rows, mask=real, other=0)
        stopped = tl.load(stopped_at + rows, mask=real, other=0)
        count = tl.load(num_kept + rows, mask=real, other=0)
    deepest = tl.where(closed & (deepest > level), level, deepest)
    kept = here & (score > float("-inf")) & ((ranks < width) | closed[:, None])
    # Best first, so what is kept stands together, behind what is NaN: no running sum is needed.
    before = count.to(tl.int32) - tl.sum((here & (score != score)).to(tl.int32), 1)
    place = before[:, None] + 1 + ranks
    # Several threads may hold a row: all have read it, and filled it, before any writes.
    tl.debug_barrier()
    tl.store(order + rows[:, None] * order_row + index, -place.to(tl.float32), mask=kept)
    tl.store(num_kept + rows, count + tl.sum(kept.to(tl.int32), 1), mask=real)
    tl.store(max_depth + rows, deepest, mask=real)
    tl.store(stopped_at + rows, tl.where(closed, level, stopped), mask=real)
    goes_on = (deepest > level)[:, None] & (ranks >= 0)
    tl.store(keep + rows[:, None] * width + ranks, goes_on, mask=real[:, None] & (ranks < width))


@triton.jit
def _log_sigmoid(z):
    """float64; `log1p` by Kahan's correction, which keeps the order of the surest nodes."""
    small = tl.exp(-tl.abs(z))
    above = 1.0 + small
    exact = above == 1.0
    log1p = tl.log(above) * (small / tl.where(exact, 1.0, above - 1.0))
    return tl.where(z < 0.0, z, 0.0) - tl.where(exact, small, log1p)


@triton.jit(do_not_specialize=PRUNE_SIZES)
def prune_kernel(
    best_index, best_score, keep, faulty, scores,
    joint_logp, draft_logp, entropy, topk_entropy, sibling_rank, of_parent, header, words,
    pool_row, scores_row, start, level, num_nodes, top_k, num_parents, num_best,
    HAS_NETWORK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK_C)
    here = nodes < num_nodes
    slot = row * pool_row + start + nodes
    joint = tl.load(joint_logp + slot, mask=here, other=float("-inf"))
    exists = joint != float("-inf")  # NaN exists: it is a fault, not an empty slot
    if HAS_NETWORK:
        logp = tl.load(draft_logp + slot, mask=exists, other=0.0)
        doubt = tl.load(entropy + slot, mask=exists, other=0.0)
        topk_doubt = tl.load(topk_entropy + slot, mask=exists, other=0.0)
        rank = tl.load(sibling_rank + slot, mask=exists, other=0).to(tl.float32)
        path = tl.where(exists, joint, 0.0)
        prob = tl.exp(path.to(tl.float64)).to(tl.float32)
        odds = tl.zeros((BLOCK_C,), tl.float64) + tl.load(words + B2).to(tl.float64)
        num_features = tl.load(header + NUM_FEATURES)
        for first in range(0, tl.load(header + NUM_HIDDEN), BLOCK_H):
            units = first + tl.arange(0, BLOCK_H)
            bias = tl.load(words + B1 + units).to(tl.float64)
            hidden = tl.zeros((BLOCK_C, BLOCK_H), tl.float64) + bias[None, :]
            for feature in range(num_features):
                column = tl.load(header + FEATURES + feature)
                x = tl.where(column == 0, prob, tl.where(column == 1, path, logp))
                x = tl.where(column == 3, doubt, tl.where(column == 4, topk_doubt, x))
                x = tl.where(column == 5, level.to(tl.float32), tl.where(column == 6, rank, x))
                weight = tl.load(words + W1 + feature * MAX_HIDDEN + units).to(tl.float64)
                hidden += x.to(tl.float64)[:, None] * weight[None, :]
            hidden = tl.where(hidden < 0.0, 0.0, hidden)  # unlike maximum, NaN stays
            weight = tl.load(words + W2 + units).to(tl.float64)
            odds += tl.sum(hidden * weight[None, :], 1)
        own = _log_sigmoid(odds).to(tl.float32)
    else:
        own = joint
    own = tl.where(exists, own, float("-inf"))
    if of_parent is not None:
        combine = tl.load(header + COMBINE)
        up = tl.load(of_parent + row * num_parents + nodes // top_k, mask=here, other=0.0)
        lesser = tl.where(up < own, up, own)
        own = tl.where(combine == 1, lesser, tl.where(combine == 2, up + own, own))
    else:
        own = tl.where(tl.load(header + COMBINE) == 1, tl.where(own > 0.0, 0.0, own), own)
        tl.store(scores + row * scores_row, float("inf"))
    place, score, is_best = best_of(own, here, num_best, BLOCK_C, BLOCK_W)
    stays = is_best | (tl.load(header + KEEP_LEAVES) != 0)
    at = scores + row * scores_row + start + nodes
    tl.store(at, tl.where(stays, own, float("-inf")), mask=here)
    ranks = tl.arange(0, BLOCK_W)
    found = row * num_best + ranks
    tl.store(best_index + found, (start + place).to(tl.int64), mask=ranks < num_best)
    tl.store(best_score + found, score, mask=ranks < num_best)
    tl.store(keep + found, score >= tl.load(words + MIN_SCORE), mask=ranks < num_best)
    tl.store(faulty + row, tl.max((here & (own != own)).to(tl.int32), 0) != 0)


def choose_bins(params: PolicyBuffer, pool: DraftPool) -> Bins:
    rows, size = pool.parent.shape
    require_at_most("choose_bins", "slots of the pool", size, max(POOL_WARPS))
    column = pool.parent.new_empty
    found = Bins(column(rows), column(rows), column(rows), column(rows, dtype=torch.float32))
    if rows:
        block = block_of(POOL_WARPS, size)
        bin_kernel[(rows,)](
            *found, pool.parent, pool.depth, pool.draft_logp, pool.joint_logp, pool.path_entropy,
            params.header, params.storage, pool.parent.stride(0), size,
            BLOCK_P=block, num_warps=POOL_WARPS[block],
        )  # fmt: skip
    return found


def close_gates(
    params: PolicyBuffer, best: Best, state: GateState, depth: int, width: int
) -> Tensor:
    rows, num_best = best.index.shape
    require_at_most("close_gates", "kept nodes of a level", num_best, max(BEST_BLOCKS))
    keep = best.index.new_empty(rows, width, dtype=torch.bool)
    block_w = block_of(BEST_BLOCKS, num_best)
    is_table = rows > MANY_ROWS and block_w == BEST_BLOCKS[0]
    block = max(GATE_BLOCKS) if is_table else min(GATE_BLOCKS)
    if rows:
        gate_kernel[(ceil_div(rows, block),)](
            keep, *state, best.index.contiguous(), best.joint_logp.contiguous(),
            params.header, params.storage,
            rows, state.order.shape[1], state.order.stride(0), depth, width, num_best,
            IS_FIRST=depth == 1, BLOCK_R=block, BLOCK_W=block_w, num_warps=GATE_BLOCKS[block],
        )  # fmt: skip
    return keep


def prune_level(
    params: PolicyBuffer, pool: DraftPool, scores: Tensor, of_parent: Tensor | None,
    start: int, depth: int, width: int,
) -> Pruned:  # fmt: skip
    rows, num_nodes = len(pool.parent), pool.parent.shape[1] - start
    num_parents = 1 if of_parent is None else of_parent.shape[1]
    best = min(width, num_nodes)
    require_at_most("prune_level", "candidates of a level", num_nodes, max(LEVEL_WARPS))
    require_at_most("prune_level", "width", best, max(BEST_BLOCKS))
    column = pool.parent.new_empty
    found = Pruned(
        index=column(rows, best),
        score=column(rows, best, dtype=torch.float32),
        keep=column(rows, best, dtype=torch.bool),
        faulty=column(rows, dtype=torch.bool),
    )
    if rows:
        block = block_of(LEVEL_WARPS, num_nodes)
        prune_kernel[(rows,)](
            *found, scores,
            pool.joint_logp, pool.draft_logp, pool.entropy, pool.topk_entropy, pool.sibling_rank,
            None if of_parent is None else of_parent.contiguous(),
            params.header, params.storage,
            pool.parent.stride(0), scores.stride(0), start, depth, num_nodes,
            num_nodes // num_parents, num_parents, best,
            HAS_NETWORK=params.layout.has_network, BLOCK_C=block,
            BLOCK_W=block_of(BEST_BLOCKS, best), BLOCK_H=HIDDEN_BLOCK[block],
            num_warps=LEVEL_WARPS[block],
        )  # fmt: skip
    return found
