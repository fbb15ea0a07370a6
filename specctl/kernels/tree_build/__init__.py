"""`append_level`, `select_nodes`, `link_tree`: growth and selection of a draft tree.

Everything stays on the device at a fixed capacity, so that a round can be captured in graphs:

    append_level   after every drafted level: appends candidates to the pool and ranks them
    select_nodes   once a round: selects the best N nodes of the pool
    link_tree      once a round: makes a tree of the selected nodes
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.kernels.checks import (
    refuse,
    require_at_least,
    require_at_most,
    require_dense,
    require_tensor,
)
from specctl.kernels.dispatch import implementation
from specctl.tree import Children, DraftPool

WORD_BITS = 32


COLUMN_TYPES = {
    "token_ids": torch.int64,
    "parent": torch.int64,
    "depth": torch.int64,
    "draft_logp": torch.float32,
    "joint_logp": torch.float32,
    "entropy": torch.float32,
    "topk_entropy": torch.float32,
    "sibling_rank": torch.int64,
    "expanded": torch.bool,
    "path_entropy": torch.float32,
}
"""Columns of a pool grown by kernels, in the order of `DraftPool`."""
LINKED = ("token_ids", "parent", "depth", "draft_logp")
"""Columns that `link_tree` reads."""


class Best(NamedTuple):
    """The best candidates of a level, `[B, W']`, best first."""

    index: Tensor  # type: ignore[assignment]  # not the method of tuples
    """Int64, pool slots."""
    joint_logp: Tensor  # float32, nats


class BuiltTree(NamedTuple):
    """Trees of up to N nodes in their own numbering, `[B, N]` int64 unless said otherwise."""

    submitted: Tensor  # pool slots, ascending, -1 in empty slots
    token_ids: Tensor  # 0 in empty slots
    parent: Tensor  # -2 in empty slots
    depth: Tensor  # 0 in empty slots
    draft_logp: Tensor  # float32, 0 in empty slots
    position_ids: Tensor  # position of the root plus depth
    valid: Tensor  # bool
    num_nodes: Tensor  # `[B]`, root counted
    ancestor_bits: Tensor
    """`[B, N, ceil(N / 32)]` int32; bit j of word w is set if node 32 w + j is an ancestor or the
    node itself. An empty slot sees itself alone, which keeps attention finite."""


def append_level(
    pool: DraftPool,
    frontier: Tensor,
    keep: Tensor,
    children: Children,
    *,
    start: int,
    depth: int,
    num_best: int,
) -> Best:
    """Appends the children of a frontier to the pool, and ranks them.

    For each row b, as a loop:

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
    rows, width, top_k = len(pool.token_ids), frontier.shape[-1], children.token_ids.shape[-1]
    require_tensor(op, "frontier", frontier, (rows, None), torch.int64)
    require_tensor(op, "keep", keep, (rows, width), torch.bool)
    shape = (rows, width, top_k)
    require_tensor(op, "children.token_ids", children.token_ids, shape, torch.int64)
    require_tensor(op, "children.logp", children.logp, shape, torch.float32)
    require_tensor(op, "children.entropy", children.entropy, shape[:2], torch.float32)
    require_tensor(op, "children.topk_entropy", children.topk_entropy, shape[:2], torch.float32)
    if children.known is not None:
        require_tensor(op, "children.known", children.known, shape, torch.bool)
    require_at_most(op, "slots", start + width * top_k, pool.parent.shape[1])
    module = implementation(__name__, op, *pool, frontier, keep, *children)
    num_best = min(num_best, width * top_k)
    best: Best = module.append_level(pool, frontier, keep, children, start, depth, num_best)
    return best


def select_nodes(
    scores: Tensor,
    num_tokens: int,
    *,
    limit: Tensor | None = None,
    min_score: Tensor | None = None,
) -> Tensor:
    """The nodes of highest score in pool order (EAGLE-2's rerank, arXiv:2406.16858, 4.2).

    For each row b, as a loop:

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
    op = "select_nodes"
    require_tensor(op, "scores", scores, (None, None), torch.float32)
    require_at_least(op, "num_tokens (the root is one)", num_tokens, 1)
    if limit is not None:
        require_tensor(op, "limit", limit, (len(scores),), torch.int64)
    if min_score is not None:
        require_tensor(op, "min_score", min_score, (1,), torch.float32)
    module = implementation(__name__, op, scores, limit, min_score)
    submitted: Tensor = module.select_nodes(scores, num_tokens, limit, min_score)
    return submitted


def link_tree(
    pool: DraftPool, submitted: Tensor, max_depth: int, positions: Tensor | None = None
) -> BuiltTree:
    """The sub-tree of some nodes of a pool, re-numbered for verification.

    For each row b, as a loop, with n and m over nodes:

        slot = {submitted[b, n]: n for n in range(N) if submitted[b, n] >= 0}
        up[n] = -1 if pool.parent is -1 at submitted[b, n] else slot.get(that parent)
        a node from which `up` does not lead to node 0, which is the root, is emptied
        parent[b, n] = up[n]
        token_ids, depth, draft_logp = those of the pool
        position_ids[b, n] = positions[b] + depth[b, n]
        ancestor_bits[b, n] = bits of n, parent[b, n], and so on up to the root

    Args:
        submitted: `[B, N]` int64 pool slots, ascending in each row, root first, -1 in empty slots.
        max_depth: deepest level present; more is harmless, with less deeper nodes are emptied.
        positions: `[B]` int64, of the roots; None: 0.

    Raises:
        UsageError: other dtypes or shapes, several devices, or above the kernel's capacity.
    """
    op, rows = "link_tree", len(pool.parent)
    check_pool(op, pool, LINKED)
    require_tensor(op, "submitted", submitted, (rows, None), torch.int64)
    if positions is not None:
        require_tensor(op, "positions", positions, (rows,), torch.int64)
    module = implementation(__name__, op, *pool[:4], submitted, positions)
    built: BuiltTree = module.link_tree(pool, submitted, max_depth, positions)
    return built


def check_pool(op: str, pool: DraftPool, columns: Iterable[str] = COLUMN_TYPES) -> None:
    """Rejects columns of other dtypes or sizes, or of unequal strides, as kernels write them."""
    shape = tuple(pool.token_ids.shape)
    for name in columns:
        column = getattr(pool, name)
        if column is None:
            refuse(op, f"pool.{name} is missing")
        require_tensor(op, f"pool.{name}", column, shape or (None, None), COLUMN_TYPES[name])
        require_dense(op, f"pool.{name}", column, pool.token_ids)
