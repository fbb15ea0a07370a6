"""`choose_bins`, `close_gates`, `prune_level`: decisions of policies on the device.

All parameters come from one buffer (`layout`) that may be overwritten between two rounds.
Thresholds and the values compared with them are float32, so decisions equal those of the rules in
`specctl.policy` for every float32. A network is computed in float64 and rounded once: its scores
are within one float32 step of the reference's, and differ from the float32 rule's by that rule's
rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specctl.kernels.checks import refuse, require_at_most, require_tensor
from specctl.kernels.dispatch import implementation
from specctl.kernels.policy_eval.layout import Kind, PolicyBuffer
from specctl.kernels.tree_build import Best, check_pool
from specctl.tree import DraftPool


class Bins(NamedTuple):
    """The regime of each row."""

    bins: Tensor  # `[B]` int64
    max_depth: Tensor  # `[B]` int64
    num_tokens: Tensor  # `[B]` int64
    value: Tensor  # `[B]` float32, Φ, nats


class GateState(NamedTuple):
    """The gates' memory of B requests within a round; the first level resets it."""

    max_depth: Tensor  # `[B]` int64, levels to draft
    stopped_at: Tensor  # `[B]` int64, level whose gate closed, 0 for none
    num_kept: Tensor  # `[B]` int64, nodes kept so far, the root not counted
    order: Tensor  # `[B, P]` float32, 0 at the root, -n at the n-th kept node, -inf elsewhere


class Pruned(NamedTuple):
    """The best of a scored level."""

    index: Tensor  # type: ignore[assignment]  # not the method of tuples
    """`[B, W]` int64 pool slots, best first."""
    score: Tensor  # `[B, W]` float32
    keep: Tensor  # `[B, W]` bool: expand this one
    faulty: Tensor  # `[B]` bool: a score is NaN


def new_gate_state(num_rows: int, capacity: int, device: torch.device | str = "cpu") -> GateState:
    max_depth, stopped_at, num_kept = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
    order = torch.zeros(num_rows, capacity, device=device)
    return GateState(max_depth, stopped_at, num_kept, order)


def choose_bins(params: PolicyBuffer, pool: DraftPool) -> Bins:
    """The bin of each request's Φ, after its base draft (HeteroSpec, arXiv:2505.13254, 4.2).

    For each row b, as a loop:

        valid = [i for i in range(P) if parent[b, i] > -2]
        deepest = max(depth[b, i] for i in valid)
        score = draft_logp if conditional else joint_logp
        end = argmax(score[b, i] if i in valid and depth[b, i] == deepest else -inf)   # the first
        value[b] = path_entropy[b, end]
        bins[b] = sum(not (edge >= value[b]) for edge in edges)       # NaN: the last bin
        max_depth[b], num_tokens[b] = depths[bins[b]], tokens[bins[b]]

    The fused kernel takes pools of up to 4,096 slots.

    Args:
        pool: what has been written of it (`tree_build.written`).

    Raises:
        UsageError: another buffer, dtype or shape, several devices, or above the kernel's capacity.
    """
    _require_kind("choose_bins", params, "bins")
    check_pool("choose_bins", pool)
    bins: Bins = implementation(__name__, "choose_bins", *pool, params.storage).choose_bins(
        params, pool
    )
    return bins


def close_gates(
    params: PolicyBuffer, best: Best, state: GateState, *, depth: int, width: int
) -> Tensor:
    """Passes a level through its gate (ECHO, arXiv:2604.09603, Eq. 5 to 7), after every level.

    For each row b, as a loop:

        if depth == 1:
            max_depth[b], stopped_at[b], num_kept[b] = first_depth, 0, 0
            order[b, :] = [0, -inf, -inf, ...]
        confidence = best.joint_logp[b, 0]
        closed = confidence < bars[depth] and confidence > -inf     # a level without gate: -inf
        if closed:
            stopped_at[b], max_depth[b] = depth, min(max_depth[b], depth)
        for w in range(W'):
            if best.joint_logp[b, w] > -inf and (w < width or closed):
                num_kept[b] += 1
                order[b, best.index[b, w]] = -num_kept[b]
        keep[b, :width] = max_depth[b] > depth

    `order` ranks the kept nodes from the root on, so that `select_nodes(order, num_tokens)` submits
    the nodes of Algorithm 1. NaN closes nothing and is not kept.

    Args:
        best: of the level, best first as `append_level` gives them, as wide as a closed gate
            keeps (W_max); the frontier is its first `width` columns.
        state: written in place.
        depth: of the level, 1 to 64. width: W_dflt, at most W'.

    Returns:
        `[B, width]` bool, whether to expand.

    Raises:
        UsageError: other dtypes or shapes, several devices, or a buffer that holds no gates.
    """
    op = "close_gates"
    _require_kind(op, params, "gates")
    rows = len(best.index)
    require_tensor(op, "best.index", best.index, (rows, None), torch.int64)
    require_tensor(op, "best.joint_logp", best.joint_logp, tuple(best.index.shape), torch.float32)
    for name in ("max_depth", "stopped_at", "num_kept"):
        require_tensor(op, f"state.{name}", getattr(state, name), (rows,), torch.int64)
    require_tensor(op, "state.order", state.order, (rows, None), torch.float32)
    require_at_most(op, "depth", depth, 64)
    require_at_most(op, "width", width, best.index.shape[1])
    module = implementation(__name__, op, *best, *state, params.storage)
    keep: Tensor = module.close_gates(params, best, state, depth, width)
    return keep


def prune_level(
    params: PolicyBuffer,
    pool: DraftPool,
    scores: Tensor,
    of_parent: Tensor | None,
    *,
    start: int,
    depth: int,
    width: int,
) -> Pruned:
    """Scores a level and keeps what reaches the threshold (C2T, arXiv:2502.13652, 4.2).

    For each row b, as a loop, C = P - start nodes standing K a parent:

        if start == 1:
            scores[b, 0] = inf
        for c in range(C):
            i = start + c
            x = [column of i for column in columns]        # joint_prob is exp(joint_logp)
            z = w2 · relu(w1 · x + b1) + b2                # in float64
            own = float32(min(z, 0) - log1p(exp(-abs(z))))     # or joint_logp
            if joint_logp[b, i] == -inf: own = -inf
            up = of_parent[b, c // K] if start > 1 else 0
            s[c] = own, min(up, own) or up + own           # `combine`
        ranked = sorted(range(C), key=lambda c: (-s[c], c))[:width]
        if not keep_leaves: s[c] = -inf for all c not in ranked
        scores[b, start:start + C] = s
        index[b], score[b] = start + ranked, s[ranked]
        keep[b] = score[b] >= min_score
        faulty[b] = any(isnan(s))

    NaN ranks before all else, as in `torch.sort`, and is never kept. `select_nodes(scores,
    num_tokens, min_score=params.min_score)` then submits the rule's choice. The fused
    kernel takes levels of up to 1,024 candidates and keeps up to 64.

    Args:
        pool: what has been written of it, this level last.
        scores: `[B, >= P]` float32, written in place.
        of_parent: `[B, W]` float32, `score` of the level above; None for the root's children.
        start: first slot of the level. depth: of its nodes.

    Raises:
        UsageError: other dtypes or shapes, several devices, a buffer that holds no threshold.
    """
    op = "prune_level"
    _require_kind(op, params, "pruned")
    check_pool(op, pool)
    rows, size = pool.parent.shape
    require_tensor(op, "scores", scores, (rows, None), torch.float32)
    require_at_most(op, "slots", size, scores.shape[1])
    num_nodes, parents = size - start, 1
    if of_parent is not None:
        require_tensor(op, "of_parent", of_parent, (rows, None), torch.float32)
        parents = of_parent.shape[1]
    if num_nodes < 1 or num_nodes % parents:
        problem = f"{num_nodes} nodes of a level cannot be shared equally by {parents} parents"
        refuse(op, problem, "cut the pool behind the level, and give its first slot as start")
    module = implementation(__name__, op, *pool, scores, of_parent, params.storage)
    pruned: Pruned = module.prune_level(params, pool, scores, of_parent, start, depth, width)
    return pruned


def _require_kind(op: str, params: PolicyBuffer, kind: Kind) -> None:
    if params.layout.kind != kind:
        problem = f"the parameter buffer must be of kind {kind}, not {params.layout.kind}"
        refuse(op, problem, "call the op of this policy")
