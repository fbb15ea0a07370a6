"""`append_level`, `select_nodes`, `link_tree`, `finish_tree`: a draft tree grows and is cut.

All of it stays on the device and has a fixed capacity, so that a round can be captured in graphs:

    append_level   after every drafted level: candidates behind the pool, the best of them
    finish_tree    once a round: the best N of the pool as a tree of its own
    select_nodes, link_tree   its two halves, where a budget takes nodes away in between
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.checks import require_at_most, require_tensor
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.tree_build import reference
from specctl.kernels.tree_build.columns import (
    PAD,
    ROOT,
    WORD_BITS,
    Best,
    BuiltTree,
    Children,
    Pool,
    check_children,
    check_pool,
    written,
)

__all__ = [
    "PAD",
    "ROOT",
    "WORD_BITS",
    "Best",
    "BuiltTree",
    "Children",
    "Pool",
    "append_level",
    "finish_tree",
    "link_tree",
    "select_nodes",
    "written",
]


def append_level(
    pool: Pool,
    frontier: Tensor,
    keep: Tensor,
    children: Children,
    *,
    start: int,
    depth: int,
    num_best: int,
) -> Best:
    """Writes the children of a frontier behind the pool, and finds the best of them.

    For each row b, in words a reader can execute:

        for w in range(W):
            up = frontier[b, w]
            expanded[b, up] = keep[b, w]
            for k in range(K):
                i = start + w * K + k
                exists = keep[b, w] and known[b, w, k]
                token_ids[b, i], draft_logp[b, i] = children.token_ids[b, w, k], logp[b, w, k]
                parent[b, i] = up if exists else -2
                depth[b, i], sibling_rank[b, i], expanded[b, i] = depth, k, False
                entropy[b, i], topk_entropy[b, i] = children.entropy[b, w], topk_entropy[b, w]
                joint_logp[b, i] = joint_logp[b, up] + logp[b, w, k] if exists else -inf
                path_entropy[b, i] = topk_entropy[b, w] + (path_entropy[b, up] if exists else 0)
        candidates = range(start, start + W * K)
        best[b] = sorted(candidates, key=lambda i: (-joint_logp[b, i], i))[:num_best]

    Additions are single ones in float32, so every implementation gives the same bits. NaN ranks
    before all else, as in `torch.sort`. The fused kernel takes levels of up to 1,024 candidates
    and keeps up to 64.

    Args:
        frontier: `[B, W]` int64, slots below `start`, distinct. keep: `[B, W]` bool. Both with
            any strides.
        start: first slot to write. depth: of the children.
        num_best: W', cut to W · K.

    Raises:
        UsageError: other dtypes or shapes, several devices, or no room behind `start`.
    """
    op = "append_level"
    check_pool(op, pool)
    require_tensor(op, "frontier", frontier, (len(pool.token_ids), None), torch.int64)
    require_tensor(op, "keep", keep, tuple(frontier.shape), torch.bool)
    check_children(op, children, frontier)
    require_at_most(op, "slots", start + children.token_ids[0:1].numel(), pool.parent.shape[1])
    best = min(num_best, frontier.shape[1] * children.token_ids.shape[2])
    if not runs_fused(op, *pool, frontier, keep, *_present(children)):
        return reference.append_level(pool, frontier, keep, children, start, depth, best)
    from specctl.kernels.tree_build import fused

    return fused.append_level(pool, frontier, keep, children, start, depth, best)


def select_nodes(
    scores: Tensor,
    num_tokens: int,
    *,
    limit: Tensor | None = None,
    min_score: Tensor | None = None,
) -> Tensor:
    """The nodes of highest score in pool order (EAGLE-2's rerank, arXiv:2406.16858, 4.2).

    For each row b, in words a reader can execute:

        alive = [i for i in range(P) if scores[b, i] > -inf and scores[b, i] >= min_score]
        best = sorted(alive, key=lambda i: (-scores[b, i], i))[:min(num_tokens, limit[b])]
        submitted[b] = sorted(best) padded with -1 to num_tokens

    Where scores never rise along a path, as those of joint probabilities, the choice is closed:
    ties go to the earlier node, hence to the parent. NaN is never chosen. The fused kernel takes
    pools of up to 4,096 slots and chooses up to 1,024.

    Args:
        scores: `[B, P]` float32, more is better, -inf in empty slots; rows may be strided.
        num_tokens: N, root counted. limit: `[B]` int64, smaller sizes of rows; None: none.
        min_score: `[1]` float32, on the device, e.g. a part of a parameter buffer; None: none.

    Returns:
        `[B, N]` int64.

    Raises:
        UsageError: other dtypes or shapes, several devices, or above the kernel's capacity.
    """
    _check_scores("select_nodes", scores, num_tokens, limit, min_score)
    if not runs_fused("select_nodes", scores, *_given(limit, min_score)):
        return reference.select_nodes(scores, num_tokens, limit, min_score)
    from specctl.kernels.tree_build import fused

    return fused.select_nodes(scores, num_tokens, limit, min_score)


def link_tree(
    pool: Pool, submitted: Tensor, max_depth: int, positions: Tensor | None = None
) -> BuiltTree:
    """The sub-tree of some nodes of a pool, re-numbered, with all that verification needs of it.

    For each row b, in words a reader can execute, n and m running over nodes:

        slot = {submitted[b, n]: n for n in range(N) if submitted[b, n] >= 0}
        up[n] = -1 if pool.parent is -1 at submitted[b, n] else slot.get(that parent)
        a node from which `up` does not lead to node 0, which is the root, is emptied
        parent[b, n] = up[n]
        token_ids, depth, draft_logp = those of the pool
        position_ids[b, n] = positions[b] + depth[b, n]
        first_child[b, n] = min(m with parent[b, m] == n)
        next_sibling[b, n] = min(m > n with parent[b, m] == parent[b, n])
        ancestor_bits[b, n] = bits of n, parent[b, n], and so on up to the root

    Args:
        submitted: `[B, N]` int64 pool slots, ascending in each row, root first, -1 in empty slots.
        max_depth: deepest level present; more is harmless, with less deeper nodes are emptied.
        positions: `[B]` int64, of the roots; None: 0.

    Raises:
        UsageError: other dtypes or shapes, several devices, or above the kernel's capacity.
    """
    op = "link_tree"
    check_pool(op, pool)
    require_tensor(op, "submitted", submitted, (len(pool.parent), None), torch.int64)
    _check_positions(op, positions, len(pool.parent))
    if not runs_fused(op, *pool, submitted, *_given(positions)):
        return reference.link_tree(pool, submitted, max_depth, positions)
    from specctl.kernels.tree_build import fused

    return fused.link_tree(pool, submitted, max_depth, positions)


def finish_tree(
    pool: Pool,
    scores: Tensor,
    num_tokens: int,
    max_depth: int,
    *,
    limit: Tensor | None = None,
    min_score: Tensor | None = None,
    positions: Tensor | None = None,
) -> BuiltTree:
    """`link_tree(pool, select_nodes(scores, num_tokens), max_depth, positions)` in one launch.

    Args:
        pool: of at least the slots that are scored. The rest: as there.
    """
    op = "finish_tree"
    check_pool(op, pool)
    _check_scores(op, scores, num_tokens, limit, min_score)
    if len(scores) != len(pool.parent):
        require_tensor(op, "scores", scores, (len(pool.parent), None))
    require_at_most(op, "scores", scores.shape[1], pool.parent.shape[1])
    _check_positions(op, positions, len(scores))
    if not runs_fused(op, *pool, scores, *_given(limit, min_score, positions)):
        submitted = reference.select_nodes(scores, num_tokens, limit, min_score)
        return reference.link_tree(pool, submitted, max_depth, positions)
    from specctl.kernels.tree_build import fused

    return fused.finish_tree(pool, scores, num_tokens, max_depth, limit, min_score, positions)


def _check_scores(
    op: str, scores: Tensor, num_tokens: int, limit: Tensor | None, min_score: Tensor | None
) -> None:
    require_tensor(op, "scores", scores, (None, None), torch.float32)
    if limit is not None:
        require_tensor(op, "limit", limit, (len(scores),), torch.int64)
    if min_score is not None:
        require_tensor(op, "min_score", min_score, (1,), torch.float32)
    if num_tokens < 1:
        raise UsageError(
            f"kernel {op}, num_tokens",
            expected="at least the root",
            found=str(num_tokens),
            fix="submit 1 or more",
        )


def _check_positions(op: str, positions: Tensor | None, num_rows: int) -> None:
    if positions is not None:
        require_tensor(op, "positions", positions, (num_rows,), torch.int64)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _present(children: Children) -> list[Tensor]:
    return _given(*children)
