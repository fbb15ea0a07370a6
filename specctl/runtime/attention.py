"""Attention over a cached prefix plus a draft tree, plugged into transformers' interfaces.

The mask is always explicit: `[A, 1, T, S]` bool, true where a query may look, or the words of a
`Cascade`. A model loaded with `attn_implementation=ATTENTION` therefore can never fall back to
"causal, mask omitted", the silent error that notes/live-engines.md (3.2) measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from specctl.errors import InvariantError, ModelConfigError
from specctl.runtime.cascade import Cascade, cascade_attention
from specctl.runtime.packing import Packing

ATTENTION = "specctl_tree"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    cascade: Cascade | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Masked attention in transformers' calling convention.

    Args:
        query: `[A, Hq, T, D]`, or `[1, Hq, T, D]` of packed rows. key, value: `[A, Hkv, S, D]`,
            heads not repeated.
        attention_mask: `[A, 1, T, S]` bool, true where visible; `[1, 1, T, S]` of packed rows;
            the int32 words of a cascade.
        packing: whose tokens these are, where rows are packed.
        cascade: where they look, if that is not said by a dense mask.

    Returns:
        `[A, T, Hq, D]` contiguous, or `[1, T, Hq, D]`, and None for weights.

    Raises:
        ModelConfigError: the model asks for attention sinks, score capping or a bias.
        InvariantError: no mask, or packed rows of a model that does not say so here.
    """
    del dropout
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ModelConfigError(
                f"attention of {type(module).__name__}",
                expected="plain scaled dot-product attention",
                found=f"option {name}",
                fix="use another model; this runtime would compute it wrongly",
            )
    if attention_mask is None:
        raise InvariantError(
            "attention", expected="an explicit mask", found="none", fix="report this model"
        )
    if cascade is not None:
        return cascade_attention(query, key, value, cascade, scaling), None
    if packing is not None:
        output = packed_attention(query, key, value, packing, scaling)
    elif len(query) == len(key) and attention_mask.dtype == torch.bool:
        output = masked_attention(query, key, value, attention_mask, scaling)
    else:
        raise InvariantError(
            f"attention of {type(module).__name__}",
            expected="the option 'packing' or 'cascade', which its model was called with",
            found=f"{len(query)} row of queries for {len(key)} of keys without it",
            fix="report this model",
        )
    return output.transpose(1, 2).contiguous(), None


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None = None
) -> Tensor:
    """`[A, Hq, T, D]`: softmax(q kᵀ · scaling) v over the visible entries, heads grouped."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None = None
) -> Tensor:
    """`[1, Hq, T, D]`: each row's tokens over the entries of its own slot, and no other's.

    Args:
        query: `[1, Hq, T, D]`. key, value: `[A, Hkv, S, D]`.
    """
    output = torch.empty_like(query)
    for row, (start, end, mask) in enumerate(packing.stretches):  # of a batch, never of nodes
        slot, seen = slice(row, row + 1), slice(mask.shape[3])
        output[:, :, start:end] = masked_attention(
            query[:, :, start:end], key[slot, :, seen], value[slot, :, seen], mask, scaling
        )
    return output


def prefix_mask(
    offsets: list[int], inner: Tensor, width: int, buffer: Tensor | None = None
) -> Tensor:
    """Visibility of cached prefixes and of the entries written right behind them.

    Args:
        offsets: prefix length of each row; new entry i stands at `offsets[b] + i`.
        inner: `[A or 1, T, M]` bool, which of the M entries behind the prefix a query sees.
        width: S, entries that attention covers.
        buffer: `[A, 1, T, capacity]` bool to write into, instead of a new tensor.

    Returns:
        `[A, 1, T, S]` bool.
    """
    rows, (queries, behind) = len(offsets), inner.shape[1:]
    if buffer is None:
        mask = inner.new_zeros(rows, 1, queries, width)
    else:
        mask = buffer[..., :width].zero_()
    for row, offset in enumerate(offsets):  # rows of a batch, never nodes
        mask[row, 0, :, :offset] = True
        mask[row, 0, :, offset : offset + behind] = inner[row if len(inner) > 1 else 0]
    return mask


def causal_inner(size: int, device: torch.device) -> Tensor:
    """`[1, T, T]` bool: each of T new tokens sees itself and the ones before it."""
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


AttentionInterface.register(ATTENTION, tree_attention)
# Without a mask function transformers may hand over no mask at all; see the module docstring.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
