"""Attention of P trees over one text: each node sees a prefix of the text and its ancestors.

    text   t0 t1 t2 t3 t4           tree of t2 sees t0 .. t2 and its own ancestors,
                 │     └─ tree      tree of t4 sees t0 .. t4 and its own ancestors:
                 └─ tree            one copy of the text's keys serves all trees

The softmax of each part is computed alone and the two are merged by log-sum-exp, so that all nodes
of all trees multiply with one matrix of the text's keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from specctl.runtime.attention import ATTENTION
from specctl.runtime.cached_model import SlotCache

DENSE_ATTENTION = "specctl_dense"


class Prefix(NamedTuple):
    """The text read so far."""

    keys: Tensor  # `[Hkv, S, D]`
    values: Tensor  # `[Hkv, S, D]`
    stable: Tensor  # `[P]` int64, entries that the tree of each position sees, at least 1
    first: int  # the least of `stable`: every tree sees the entries before it


class Nodes(NamedTuple):
    """The nodes of the trees so far, the current level last."""

    keys: Tensor  # `[P, Hkv, M, D]`
    values: Tensor  # `[P, Hkv, M, D]`
    visible: Tensor  # `[P, W, M]` bool, ancestors of each node of the level, itself included


def merged_attention(query: Tensor, prefix: Prefix, nodes: Nodes, scaling: float) -> Tensor:
    """`[P, Hq, W, D]`: the joint softmax, merged from those of prefix and nodes.

    Args:
        query: `[P, Hq, W, D]`, the nodes of one level.
    """
    rows, heads, width, dim = query.shape
    num_kv = len(prefix.keys)
    grouped = (query * scaling).reshape(rows, num_kv, -1, dim)
    far, far_lse = _over_prefix(grouped, prefix)
    hidden = ~nodes.visible.repeat(1, heads // num_kv, 1)[:, None]
    scores = wide(grouped @ nodes.keys.transpose(2, 3)).masked_fill_(hidden, float("-inf"))
    weights, near_lse = _softmax(scores)
    near = wide(weights.to(query.dtype) @ nodes.values)
    share = (far_lse - near_lse).sigmoid()[..., None]  # the prefix's part of the joint softmax
    return torch.lerp(near, far, share).reshape(rows, heads, width, dim).to(query.dtype)


def _over_prefix(query: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
    """Attention to the text, and its log-sum-exp; `query` `[P, Hkv, Q, D]` is scaled."""
    rows, num_kv, size, dim = query.shape
    flat = query.transpose(0, 1).reshape(num_kv, rows * size, dim)
    scores = wide(flat @ prefix.keys.transpose(1, 2))
    last = scores.view(num_kv, rows, size, -1)[..., prefix.first :]
    places = torch.arange(prefix.first, prefix.keys.shape[1], device=query.device)
    last.masked_fill_((places >= prefix.stable[:, None])[:, None], float("-inf"))
    weights, lse = _softmax(scores)
    found = wide(weights.to(query.dtype) @ prefix.values)
    shape = (num_kv, rows, size, -1)
    return found.view(shape).transpose(0, 1), lse.view(shape[:3]).transpose(0, 1)


def wide(values: Tensor) -> Tensor:
    """Values in float32 at least, for the many terms of a softmax."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis, in place, and the log-sum-exp. No row may be all -inf."""
    best = scores.amax(-1, keepdim=True)
    weights = scores.sub_(best).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights.div_(total), (best + total.log())[..., 0]


class TreeMemory:
    """Keys and values of the trees of P positions over one text.

    Args:
        cache: the text, in its first slot.
        stable: entries of the text that each tree sees: `stable` .. `stable + P - 1`.
    """

    def __init__(self, cache: SlotCache, stable: range) -> None:
        self.level, self._cache, self._size = 0, cache, stable.stop - 1
        self._first, device = stable.start, cache.of_layer(0).device
        self._stable = torch.arange(stable.start, stable.stop, device=device)
        self._nodes: list[Nodes | None] = [None] * cache.num_layers
        self._visible: Tensor | None = None

    def descend(self, parent_slot: Tensor) -> None:
        """Starts a level below `parent_slot` `[P, W]`, columns of the previous level."""
        rows, width = parent_slot.shape
        own = torch.eye(width, dtype=torch.bool, device=parent_slot.device).expand(rows, -1, -1)
        if self._visible is not None:
            index = parent_slot[..., None].expand(-1, -1, self._visible.shape[2])
            own = torch.cat([self._visible.gather(1, index), own], 2)
        self._visible = own
        self.level += 1

    def positions(self, width: int) -> Tensor:
        """`[P, W]` positions of the nodes of this level (see `runtime.drafter`)."""
        return (self._stable + self.level - 1)[:, None].expand(-1, width)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None
    ) -> Tensor:
        """Adds the level's keys and values `[P, Hkv, W, D]` to a layer, and attends;
        `[P, Hq, W, D]`."""
        assert self._visible is not None, "descend() comes first"
        before = self._nodes[layer]
        if before is not None:
            key, value = torch.cat([before.keys, key], 2), torch.cat([before.values, value], 2)
        nodes = self._nodes[layer] = Nodes(key, value, self._visible)
        keys, values = self._cache.of_layer(layer)[:, 0, :, : self._size]
        prefix = Prefix(keys, values, self._stable, self._first)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return merged_attention(query, prefix, nodes, scaling)


# --------------------------------------------------------------------------- transformers' models

_TREES: ContextVar[TreeMemory] = ContextVar("specctl_dense_trees")


def dense_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one level of nodes, in transformers' calling convention.

    `runtime.attention.tree_attention` checked the options when the model read the text.

    Args:
        query: `[P, Hq, W, D]`.
        key, value: `[P, Hkv, W, D]`, of the level.

    Returns:
        `[P, W, Hq, D]` contiguous, and None for weights.
    """
    del attention_mask, dropout, options
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    output = _TREES.get().attend(layer, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def attend_by(model: PreTrainedModel, trees: TreeMemory) -> Iterator[None]:
    """Inside the block, `model` attends by `trees` instead of its cache and mask."""
    token = _TREES.set(trees)
    model.set_attn_implementation(DENSE_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
        _TREES.reset(token)


AttentionInterface.register(DENSE_ATTENTION, dense_attention)
AttentionMaskInterface.register(DENSE_ATTENTION, sdpa_mask)
