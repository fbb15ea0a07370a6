"""Deciding in Triton. The header is read on the device: it may differ from launch to launch."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (arguments are pointers and constants)
from __future__ import annotations

import triton
import triton.language as tl

from specctl.kernels.policy_eval import layout
from specctl.kernels.ranking import best_of, order_bits
from specctl.kernels.tree_build.columns import PAD as _PAD_VALUE

PAD = tl.constexpr(_PAD_VALUE)
FIRST_DEPTH, NUM_EDGES, CONDITIONAL, NUM_FEATURES, NUM_HIDDEN, COMBINE, KEEP_LEAVES, FEATURES = (
    tl.constexpr(word)
    for word in (
        layout.FIRST_DEPTH, layout.NUM_EDGES, layout.CONDITIONAL, layout.NUM_FEATURES,
        layout.NUM_HIDDEN, layout.COMBINE, layout.KEEP_LEAVES, layout.FEATURES,
    )
)  # fmt: skip
EDGES, BIN_DEPTHS, BIN_TOKENS, BARS, MIN_SCORE, W1, B1, W2, B2 = (
    tl.constexpr(word)
    for word in (
        layout.EDGES, layout.BIN_DEPTHS, layout.BIN_TOKENS, layout.BARS, layout.MIN_SCORE,
        layout.W1, layout.B1, layout.W2, layout.B2,
    )
)  # fmt: skip
MAX_HIDDEN, NUM_COLUMNS = tl.constexpr(layout.MAX_HIDDEN), tl.constexpr(len(layout.COLUMNS))
EDGE_CHUNK = tl.constexpr(8)
JOINT, NETWORK, GIVEN = 0, 1, 2
_NETWORK, _GIVEN = tl.constexpr(NETWORK), tl.constexpr(GIVEN)
ROW_SIZES = ["num_rows"]
POOL_SIZES = ["pool_row", "num_slots"]
GATE_SIZES = ["num_rows", "num_slots", "order_row", "level", "width", "num_best"]
PRUNE_SIZES = [
    "pool_row", "scores_row", "start", "level", "num_nodes", "top_k", "num_parents", "num_best",
    "num_extra",
]  # fmt: skip
"""A size that happens to be 1 or a multiple of 16 must not compile a kernel again mid-request."""


@triton.jit
def _bin_of(value, header, words, BLOCK_R: tl.constexpr):
    """Edges strictly below each value; `not >=` rather than `<`, so that NaN goes to the end."""
    num_edges = tl.load(header + NUM_EDGES)
    bins = tl.zeros((BLOCK_R,), tl.int32)
    for first in range(0, num_edges, EDGE_CHUNK):
        place = first + tl.arange(0, EDGE_CHUNK)
        edge = tl.load(words + EDGES + place, mask=place < num_edges, other=0.0)
        is_left = edge[None, :] >= value[:, None]
        bins += tl.sum(tl.where(is_left | (place >= num_edges)[None, :], 0, 1), 1)
    return bins


@triton.jit
def _store_bins(bins, max_depth, num_tokens, value_out, value, rows, real, header, words,
                BLOCK_R: tl.constexpr):  # fmt: skip
    found = _bin_of(value, header, words, BLOCK_R)
    depth = tl.load(header + BIN_DEPTHS + found, mask=real, other=0)
    tokens = tl.load(header + BIN_TOKENS + found, mask=real, other=0)
    tl.store(bins + rows, found.to(tl.int64), mask=real)
    tl.store(max_depth + rows, depth.to(tl.int64), mask=real)
    tl.store(num_tokens + rows, tokens.to(tl.int64), mask=real)
    tl.store(value_out + rows, value, mask=real)


@triton.jit(do_not_specialize=ROW_SIZES)
def bin_kernel(
    bins, max_depth, num_tokens, value_out, value, header, words, num_rows, BLOCK_R: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = rows < num_rows
    given = tl.load(value + rows, mask=real, other=0.0)
    _store_bins(bins, max_depth, num_tokens, value_out, given, rows, real, header, words, BLOCK_R)


@triton.jit(do_not_specialize=POOL_SIZES)
def phi_kernel(
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
    lane = tl.arange(0, 1)
    phi = tl.load(path_entropy + base + end + lane)
    _store_bins(
        bins, max_depth, num_tokens, value_out, phi, row + lane, lane == 0, header, words, 1
    )


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
        tl.debug_barrier()
    else:
        deepest = tl.load(max_depth + rows, mask=real, other=0)
        stopped = tl.load(stopped_at + rows, mask=real, other=0)
        count = tl.load(num_kept + rows, mask=real, other=0)
    deepest = tl.where(closed & (deepest > level), level, deepest)
    kept = here & (score > float("-inf")) & ((ranks < width) | closed[:, None])
    # Best first, so what is kept stands together, behind what is NaN: no running sum is needed.
    before = count.to(tl.int32) - tl.sum((here & (score != score)).to(tl.int32), 1)
    place = before[:, None] + 1 + ranks
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
    joint_logp, draft_logp, entropy, topk_entropy, sibling_rank, of_parent, extra, header, words,
    pool_row, scores_row, start, level, num_nodes, top_k, num_parents, num_best, num_extra,
    OWN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK_C)
    here = nodes < num_nodes
    slot = row * pool_row + start + nodes
    joint = tl.load(joint_logp + slot, mask=here, other=float("-inf"))
    exists = joint != float("-inf")  # NaN exists: it is a fault, not an empty slot
    if OWN == _GIVEN:
        own = tl.load(extra + row * num_nodes + nodes, mask=exists, other=0.0)
    elif OWN == _NETWORK:
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
                if extra is not None:
                    at = extra + (row * num_nodes + nodes) * num_extra + column - NUM_COLUMNS
                    is_extra = column >= NUM_COLUMNS
                    x = tl.where(is_extra, tl.load(at, mask=exists & is_extra, other=0.0), x)
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
