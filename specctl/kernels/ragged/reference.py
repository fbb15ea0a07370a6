"""Torch reference of `pack_ragged` and `unpack_ragged`."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_ragged(values: Tensor, offsets: Tensor, num_packed: int) -> Tensor:
    """See `specctl.kernels.ragged.pack_ragged`."""
    return values[_places(offsets, num_packed)]


def unpack_ragged(packed: Tensor, offsets: Tensor, num_columns: int) -> Tensor:
    """See `specctl.kernels.ragged.unpack_ragged`."""
    values = packed.new_zeros(len(offsets) - 1, num_columns, *packed.shape[1:])
    values[_places(offsets, len(packed))] = packed
    return values


def _places(offsets: Tensor, num_packed: int) -> tuple[Tensor, Tensor]:
    """Row and column of every packed entry, `[T]` both."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    row = rows.repeat_interleave(offsets.diff(), output_size=num_packed)
    return row, torch.arange(num_packed, device=offsets.device) - offsets[row]
