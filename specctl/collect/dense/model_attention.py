"""Tree memory as an attention of transformers: models call it layer by layer, unaware of trees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from specctl.collect.dense.trees import TreeMemory
from specctl.runtime.attention import ATTENTION

DENSE_ATTENTION = "specctl_dense"
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

    What `runtime.attention.tree_attention` refuses was refused when the same model read the text.

    Args:
        query: `[P, Hq, W, D]`. key, value: `[P, Hkv, W, D]`, of the level alone.

    Returns:
        `[P, W, Hq, D]` contiguous, and None for weights.
    """
    del attention_mask, dropout, options
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    output = _TREES.get().attend(layer, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def attend_by(model: PreTrainedModel, trees: TreeMemory) -> Iterator[None]:
    """Inside, `model` attends by `trees` instead of by its cache and mask."""
    token = _TREES.set(trees)
    model.set_attn_implementation(DENSE_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
        _TREES.reset(token)


AttentionInterface.register(DENSE_ATTENTION, dense_attention)
AttentionMaskInterface.register(DENSE_ATTENTION, sdpa_mask)
