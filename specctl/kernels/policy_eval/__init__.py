"""`bin_rows`, `choose_bins`, `close_gates`, `prune_level`: a policy decides on the device.

All parameters come from one buffer (`layout`) that may be overwritten between two rounds.
Thresholds are float32 and so is what is compared with them, therefore decisions are those of the
rules in `specctl.policy`, on every float32. A network is computed in float64 and rounded once: its
scores equal the reference's bit for bit, and the float32 rule's but for that rule's own rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.checks import require_at_most, require_tensor
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.policy_eval import reference
from specctl.kernels.policy_eval.layout import Kind, PolicyBuffer
from specctl.kernels.policy_eval.results import Bins, GateState, Pruned
from specctl.kernels.tree_build.columns import Best, Pool, check_pool

__all__ = [
    "Bins",
    "GateState",
    "PolicyBuffer",
    "Pruned",
    "bin_rows",
    "choose_bins",
    "close_gates",
    "prune_level",
]


def bin_rows(params: PolicyBuffer, value: Tensor) -> Bins:
    """The bin of each value, and what it plans (HeteroSpec, arXiv:2505.13254, 4.2).

    For each row r, in words a reader can execute:

        bins[r] = sum(not (edge >= value[r]) for edge in edges)       # NaN: the last bin
        max_depth[r], num_tokens[r] = depths[bins[r]], tokens[bins[r]]

    Args:
        value: `[R]` float32, nats.

    Raises:
        UsageError: another dtype or shape, several devices, or a buffer that holds no bins.
    """
    _require_kind("bin_rows", params, "bins")
    require_tensor("bin_rows", "value", value, (None,), torch.float32)
    if not runs_fused("bin_rows", value, params.storage):
        return reference.bin_rows(params, value)
    from specctl.kernels.policy_eval import fused

    return fused.bin_rows(params, value)


def choose_bins(params: PolicyBuffer, pool: Pool) -> Bins:
    """The bin of each request's Φ, after its base draft.

    For each row b, in words a reader can execute:

        valid = [i for i in range(P) if parent[b, i] > -2]
        deepest = max(depth[b, i] for i in valid)
        score = draft_logp if conditional else joint_logp
        end = argmax(score[b, i] if i in valid and depth[b, i] == deepest else -inf)   # the first
        value[b] = path_entropy[b, end]
        the rest as `bin_rows`

    The fused kernel takes pools of up to 4,096 slots.

    Args:
        pool: what has been written of it (`tree_build.written`).

    Raises:
        UsageError: as `bin_rows`, or above the kernel's capacity.
    """
    _require_kind("choose_bins", params, "bins")
    check_pool("choose_bins", pool)
    if not runs_fused("choose_bins", *pool, params.storage):
        return reference.choose_bins(params, pool)
    from specctl.kernels.policy_eval import fused

    return fused.choose_bins(params, pool)


def close_gates(
    params: PolicyBuffer, best: Best, state: GateState, *, depth: int, width: int
) -> Tensor:
    """Passes a level through its gate (ECHO, arXiv:2604.09603, Eq. 5 to 7), after every level.

    For each row b, in words a reader can execute:

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

    `order` ranks the kept nodes from the root on, so that `finish_tree(pool, order, num_tokens)`
    submits what Algorithm 1 does. NaN closes nothing and is not kept.

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
    if not runs_fused(op, *best, *state, params.storage):
        return reference.close_gates(params, best, state, depth, width)
    from specctl.kernels.policy_eval import fused

    return fused.close_gates(params, best, state, depth, width)


def prune_level(
    params: PolicyBuffer,
    pool: Pool,
    scores: Tensor,
    of_parent: Tensor | None,
    *,
    start: int,
    depth: int,
    width: int,
    extra: Tensor | None = None,
) -> Pruned:
    """Scores a level and keeps what reaches the threshold (C2T, arXiv:2502.13652, 4.2).

    For each row b, in words a reader can execute, C = P - start nodes standing K a parent:

        if start == 1:
            scores[b, 0] = inf
        for c in range(C):
            i = start + c
            x = [column of i for column in columns]        # joint_prob is exp(joint_logp)
            z = w2 · relu(w1 · x + b1) + b2                # in float64
            own = float32(min(z, 0) - log1p(exp(-abs(z))))     # or joint_logp, or extra[b, c, 0]
            if joint_logp[b, i] == -inf: own = -inf
            up = of_parent[b, c // K] if start > 1 else 0
            s[c] = own, min(up, own) or up + own           # `combine`
        ranked = sorted(range(C), key=lambda c: (-s[c], c))[:width]
        if not keep_leaves: s[c] = -inf for all c not in ranked
        scores[b, start:start + C] = s
        index[b], score[b] = start + ranked, s[ranked]
        keep[b] = score[b] >= min_score
        faulty[b] = any(isnan(s))

    NaN ranks before all else, as in `torch.sort`, and is never kept. What `finish_tree(pool,
    scores, num_tokens, min_score=params.min_score)` then submits is the rule's choice. The fused
    kernel takes levels of up to 1,024 candidates and keeps up to 64.

    Args:
        pool: what has been written of it, this level last.
        scores: `[B, >= P]` float32, written in place.
        of_parent: `[B, W]` float32, `score` of the level above; None for the root's children.
        start: first slot of the level. depth: of its nodes.
        extra: `[B, C, X]` float32, the columns that `params.layout.extra` names, or for
            `own="given"` the score itself.

    Raises:
        UsageError: other dtypes or shapes, several devices, a buffer that holds no threshold.
    """
    op = "prune_level"
    _require_kind(op, params, "pruned")
    check_pool(op, pool)
    rows, size = pool.parent.shape
    require_tensor(op, "scores", scores, (rows, None), torch.float32)
    require_at_most(op, "slots", size, scores.shape[1])
    top_k = _children_each(op, size - start, of_parent, rows)
    columns = 1 if params.layout.own == "given" else len(params.layout.extra)
    if columns and extra is None:
        raise UsageError(
            f"kernel {op}, extra",
            expected=f"{columns} columns, as the layout says",
            found="none",
            fix="give what the kernel cannot compute",
        )
    if extra is not None:
        require_tensor(op, "extra", extra, (rows, size - start, columns), torch.float32)
    given = [part for part in (of_parent, extra) if part is not None]
    if not runs_fused(op, *pool, scores, *given, params.storage):
        return reference.prune_level(params, pool, scores, of_parent, start, depth, width, extra)
    from specctl.kernels.policy_eval import fused

    return fused.prune_level(
        params, pool, scores, of_parent, start, depth, width, extra, top_k=top_k
    )


def _children_each(op: str, num_nodes: int, of_parent: Tensor | None, rows: int) -> int:
    """Nodes of a level below each parent."""
    if of_parent is not None:
        require_tensor(op, "of_parent", of_parent, (rows, None), torch.float32)
    parents = 1 if of_parent is None else of_parent.shape[1]
    if num_nodes < 1 or num_nodes % parents:
        raise UsageError(
            f"kernel {op}, level",
            expected=f"some nodes below each of {parents} parents",
            found=f"{num_nodes} nodes",
            fix="cut the pool behind the level, and give its first slot as start",
        )
    return num_nodes // parents


def _require_kind(op: str, params: PolicyBuffer, kind: Kind) -> None:
    if params.layout.kind != kind:
        raise UsageError(
            f"kernel {op}, parameter buffer",
            expected=kind,
            found=params.layout.kind,
            fix="call the op of this policy",
        )
