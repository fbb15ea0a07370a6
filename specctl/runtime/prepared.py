"""Shapes prepared once and reused: the place of HeteroSpec's specialised graphs G(B_i).

A policy that prunes by bin verifies one of a few tree sizes. What a size needs is prepared at its
first use and kept under its key. On the CPU that is the mask buffer; a CUDA graph of the
verification forward belongs in the same place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShapeKey:
    """What a prepared shape is kept under.

    Attributes:
        bin: the policy's regime, where the whole batch is in one; -1 otherwise.
        num_rows, num_tokens: requests and nodes of the verification forward.
    """

    bin: int
    num_rows: int
    num_tokens: int


@dataclass(frozen=True)
class PreparedShape:
    """Buffers of one verification shape: `mask` is `[A, 1, N, capacity]` bool."""

    mask: Tensor


@dataclass
class PreparedShapes:
    """The cache. `num_prepared` and `num_reused` count misses and hits."""

    capacity: int
    device: torch.device
    shapes: dict[ShapeKey, PreparedShape] = field(default_factory=dict)
    num_reused: int = 0

    @property
    def num_prepared(self) -> int:
        return len(self.shapes)

    def get(self, key: ShapeKey) -> PreparedShape:
        """The shape's buffers, prepared now if this is their first use."""
        found = self.shapes.get(key)
        if found is None:
            size = (key.num_rows, 1, key.num_tokens, self.capacity)
            mask = torch.empty(size, dtype=torch.bool, device=self.device)
            found = self.shapes[key] = PreparedShape(mask)
        else:
            self.num_reused += 1
        return found


def common_bin(bins: Tensor | None) -> int:
    """The bin that all rows share, or -1."""
    if bins is None:
        return -1
    first = bins[0]
    return int(first) if bool((bins == first).all()) else -1
