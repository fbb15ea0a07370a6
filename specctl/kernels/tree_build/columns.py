"""The tensors that `tree_build` reads and fills."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specctl.kernels.checks import require_dense, require_tensor

ROOT, PAD = -1, -2
"""`parent` of the root, and of a slot that holds no node."""
WORD_BITS = 32


class Pool(NamedTuple):
    """Columns of a growing pool, `[B, P]` each, written in place.

    Attributes:
        token_ids, parent, depth: int64. draft_logp, joint_logp, entropy, topk_entropy: float32.
        sibling_rank: int64. expanded: bool.
        path_entropy: float32, nats, `topk_entropy` summed from the root to the node, root first
            (HeteroSpec's Φ at the end of the meta path); `topk_entropy` itself in empty slots.
    """

    token_ids: Tensor
    parent: Tensor
    depth: Tensor
    draft_logp: Tensor
    joint_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    sibling_rank: Tensor
    expanded: Tensor
    path_entropy: Tensor


COLUMN_TYPES = Pool(
    *(torch.int64,) * 3, *(torch.float32,) * 4, torch.int64, torch.bool, torch.float32
)  # type: ignore[arg-type]


class Children(NamedTuple):
    """What a drafter says below W frontier nodes of B rows.

    Attributes:
        token_ids: `[B, W, K]` int64, likeliest first. logp: `[B, W, K]` float32, nats, given the
            parent, at most 0.
        entropy, topk_entropy: `[B, W]` float32, nats.
        known: `[B, W, K]` bool, false for a child that cannot be told; None: all are known.
    """

    token_ids: Tensor
    logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    known: Tensor | None = None


class Best(NamedTuple):
    """The best candidates of a level, `[B, W']`, best first.

    Attributes:
        index: int64, pool slots. joint_logp: float32, nats.
    """

    index: Tensor
    joint_logp: Tensor


class BuiltTree(NamedTuple):
    """Trees of up to N nodes in their own numbering, `[B, N]` int64 unless said otherwise.

    Attributes:
        submitted: pool slots, ascending, -1 in empty slots.
        token_ids, parent, depth: 0, -2 and 0 in empty slots. draft_logp: float32, 0 there.
        position_ids: position of the root plus depth; the root's in empty slots.
        first_child, next_sibling: -1 for none.
        valid: bool. num_nodes: `[B]`, root counted.
        ancestor_bits: `[B, N, ceil(N / 32)]` int32; bit j of word w stands for node 32 w + j,
            which is set when that node is an ancestor or the node itself. An empty slot sees
            itself alone, so that attention over it stays finite.
    """

    submitted: Tensor
    token_ids: Tensor
    parent: Tensor
    depth: Tensor
    draft_logp: Tensor
    position_ids: Tensor
    first_child: Tensor
    next_sibling: Tensor
    valid: Tensor
    num_nodes: Tensor
    ancestor_bits: Tensor


def check_pool(op: str, pool: Pool) -> None:
    """Refuses columns of other dtypes or sizes, or that do not lie alike: they are written to."""
    shape = tuple(pool.token_ids.shape)
    for name, column, dtype in zip(Pool._fields, pool, COLUMN_TYPES, strict=True):
        require_tensor(op, f"pool.{name}", column, shape or (None, None), dtype)
        require_dense(op, f"pool.{name}", column, pool.token_ids)


def check_children(op: str, children: Children, frontier: Tensor) -> None:
    """Refuses children that do not fit a frontier of `[B, W]`."""
    rows, width = frontier.shape
    shape = (rows, width, children.token_ids.shape[-1])
    require_tensor(op, "children.token_ids", children.token_ids, shape, torch.int64)
    require_tensor(op, "children.logp", children.logp, shape, torch.float32)
    for name in ("entropy", "topk_entropy"):
        column = getattr(children, name)
        require_tensor(op, f"children.{name}", column, (rows, width), torch.float32)
    if children.known is not None:
        require_tensor(op, "children.known", children.known, shape, torch.bool)


def written(pool: Pool, size: int) -> Pool:
    """The first `size` slots of a pool."""
    return Pool(*(column[:, :size] for column in pool))
