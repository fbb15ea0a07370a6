"""What a pass tells attention in place of a dense mask: lengths, and the tail's bits.

`kernels.tree_attention` reads the prefix without a mask, so nothing here grows with the context.
The words travel through transformers as its attention mask, which it hands on as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.kernels.tree_attention import pack_ancestors, tree_attention
from specctl.runtime.packing import Layout


@dataclass(frozen=True)
class Cascade:
    """Where the tokens of a pass look; see `kernels.tree_attention`.

    Attributes:
        prefixes: `[A]` int64, entries of each row's slot before its tail.
        offsets: `[A + 1]` int64: where each row's tokens start on the packed axis, and the end.
        words: `[1, 1, T, W]` int32, the tail entries that each token sees.
        max_nodes: tokens of the largest row. behind: tail entries that earlier passes wrote.
    """

    prefixes: Tensor
    offsets: Tensor
    words: Tensor
    max_nodes: int
    behind: int

    @property
    def options(self) -> dict[str, Any]:
        """What a model is called with so that its attention learns of this."""
        return {"attention_mask": self.words, "cascade": self}


def cascade_of(layout: Layout, inner: Tensor, behind: int = 0) -> Cascade:
    """Of rows laid end to end.

    Args:
        inner: `[A or 1, N, M]` bool, which of the M entries behind its prefix a query sees.
        behind: M - N.
    """
    words = pack_ancestors(inner).expand(len(layout.prefixes), -1, -1)
    return Cascade(
        torch.tensor(layout.prefixes, device=inner.device),
        layout.offsets,
        layout.pack(words)[None],
        max(layout.sizes),
        behind,
    )


def cascade_attention(
    query: Tensor, key: Tensor, value: Tensor, cascade: Cascade, scaling: float | None = None
) -> Tensor:
    """`[A, T, Hq, D]`: attention of all rows in one call.

    Args:
        query: `[A, Hq, T, D]`, or `[1, Hq, T, D]` of packed rows. key, value: `[A, Hkv, S, D]`.
    """
    rows, _, num_columns, dim = query.shape
    output = tree_attention(
        query.transpose(1, 2).flatten(0, 1),
        key,
        value,
        cascade.prefixes,
        cascade.offsets,
        cascade.words[0, 0],
        scaling=dim**-0.5 if scaling is None else scaling,
        max_nodes=cascade.max_nodes,
        behind=cascade.behind,
    )
    return output.unflatten(0, (rows, num_columns))
