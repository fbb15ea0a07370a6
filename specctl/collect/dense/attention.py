"""Attention of P trees over one text: its prefix causally per position, the tree by ancestors.

    text   t0 t1 t2 t3 t4           tree of t2 sees t0 .. t2 and its own ancestors,
                 │     └─ tree      tree of t4 sees t0 .. t4 and its own ancestors:
                 └─ tree            one copy of the text's keys serves all trees

The two parts are softmaxed apart and merged by log-sum-exp, so that the keys of the text are one
matrix that all nodes of all trees multiply with; `exact_attention` states the same with one mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specctl.runtime.attention import masked_attention


class Prefix(NamedTuple):
    """What was read of the text.

    Attributes:
        keys, values: `[Hkv, S, D]`.
        stable: `[P]` int64, how many of them the trees of each position see, at least 1.
        first: the least of `stable`: every tree sees the entries before it.
    """

    keys: Tensor
    values: Tensor
    stable: Tensor
    first: int


class Nodes(NamedTuple):
    """The nodes of the trees so far, those of the present level last.

    Attributes:
        keys, values: `[P, Hkv, M, D]`.
        seen: `[P, W, M]` bool, ancestors of each node of the present level, itself included.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor


def merged_attention(query: Tensor, prefix: Prefix, nodes: Nodes, scaling: float) -> Tensor:
    """`[P, Hq, W, D]`: softmax over both parts together, from the softmax over each.

    Args:
        query: `[P, Hq, W, D]`, the nodes of one level. scaling: of the scores.
    """
    rows, heads, width, dim = query.shape
    num_kv = len(prefix.keys)
    grouped = (query * scaling).reshape(rows, num_kv, -1, dim)
    far, far_lse = _over_prefix(grouped, prefix)
    near, near_lse = _over_nodes(grouped, nodes, heads // num_kv)
    share = (far_lse - near_lse).sigmoid()[..., None]  # of the prefix in the joint softmax
    return torch.lerp(near, far, share).reshape(rows, heads, width, dim).to(query.dtype)


def _over_prefix(query: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
    """Attention to the text alone, and its log-sum-exp; `query` `[P, Hkv, Q, D]` is scaled."""
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


def _over_nodes(query: Tensor, nodes: Nodes, num_groups: int) -> tuple[Tensor, Tensor]:
    """Attention to the tree alone, and its log-sum-exp."""
    hidden = ~nodes.seen.repeat(1, num_groups, 1)[:, None]
    scores = wide(query @ nodes.keys.transpose(2, 3)).masked_fill_(hidden, float("-inf"))
    weights, lse = _softmax(scores)
    return wide(weights.to(query.dtype) @ nodes.values), lse


def wide(values: Tensor) -> Tensor:
    """In float32 at least: softmax sums many terms."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis, in place, and the log-sum-exp; no row is all -inf."""
    best = scores.amax(-1, keepdim=True)
    weights = scores.sub_(best).exp_()
    total = weights.sum(-1, keepdim=True)
    return weights.div_(total), (best + total.log())[..., 0]


def exact_attention(query: Tensor, prefix: Prefix, nodes: Nodes, scaling: float) -> Tensor:
    """The same with one mask over all keys, the text's repeated for every tree: the reference."""
    rows, _, width, _ = query.shape
    size = prefix.keys.shape[1]
    keys = torch.cat([prefix.keys.expand(rows, -1, -1, -1), nodes.keys], 2)
    values = torch.cat([prefix.values.expand(rows, -1, -1, -1), nodes.values], 2)
    visible = torch.arange(size, device=query.device) < prefix.stable[:, None]
    mask = torch.cat([visible[:, None].expand(-1, width, -1), nodes.seen], 2)
    return masked_attention(query, keys, values, mask[:, None], scaling)
