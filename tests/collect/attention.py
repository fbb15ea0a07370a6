"""Attention of trees over a text with one mask: the reference of the merged form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specctl.collect.dense.attention import Nodes, Prefix


def exact_attention(query: Tensor, prefix: Prefix, nodes: Nodes, scaling: float) -> Tensor:
    """One softmax over all keys, the text's repeated for every tree."""
    rows, _, width, _ = query.shape
    keys = torch.cat([prefix.keys.expand(rows, -1, -1, -1), nodes.keys], 2)
    values = torch.cat([prefix.values.expand(rows, -1, -1, -1), nodes.values], 2)
    visible = torch.arange(prefix.keys.shape[1], device=query.device) < prefix.stable[:, None]
    mask = torch.cat([visible[:, None].expand(-1, width, -1), nodes.visible], 2)
    grouped = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask[:, None], scale=scaling, enable_gqa=grouped
    )
