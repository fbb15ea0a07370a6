"""`pack_ragged`, `unpack_ragged`: rows of different sizes end to end on one axis, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.checks import require_tensor
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.ragged import reference


def pack_ragged(values: Tensor, offsets: Tensor, num_packed: int) -> Tensor:
    """Lays the first entries of every row end to end.

    In words a reader can execute:

        for b in range(B):
            packed[offsets[b] : offsets[b + 1]] = values[b, : offsets[b + 1] - offsets[b]]

    One launch on CUDA, with a copy before it only where the trailing axes of `values` cannot be
    seen as one.

    Args:
        values: `[B, N, ...]`, any dtype.
        offsets: `[B + 1]` int64, ascending from 0: where each row starts, and the end. A row may
            be empty.
        num_packed: T, the last of them, known to the caller so that no device is asked.

    Returns:
        `[T, ...]`.

    Raises:
        UsageError: other shapes or offsets of another dtype, several devices.
    """
    _check("pack_ragged", "values", values, offsets, 2)
    require_tensor("pack_ragged", "offsets", offsets, (len(values) + 1,), torch.int64)
    if not runs_fused("pack_ragged", values, offsets):
        return reference.pack_ragged(values, offsets, num_packed)
    from specctl.kernels.ragged import fused

    return fused.pack_ragged(values, offsets, num_packed)


def unpack_ragged(packed: Tensor, offsets: Tensor, num_columns: int) -> Tensor:
    """The inverse of `pack_ragged`; what lies behind a row's own entries is 0.

    Args:
        packed: `[T, ...]`. offsets: as above. num_columns: N, at least the largest row.

    Returns:
        `[B, N, ...]`.
    """
    _check("unpack_ragged", "packed", packed, offsets, 1)
    if not runs_fused("unpack_ragged", packed, offsets):
        return reference.unpack_ragged(packed, offsets, num_columns)
    from specctl.kernels.ragged import fused

    return fused.unpack_ragged(packed, offsets, num_columns)


def _check(op: str, name: str, tensor: Tensor, offsets: Tensor, num_axes: int) -> None:
    require_tensor(op, "offsets", offsets, (None,), torch.int64)
    if tensor.ndim < num_axes or not len(offsets):
        raise UsageError(
            f"kernel {op}, {name}",
            expected=f"at least {num_axes} axes, and at least one offset",
            found=f"{tensor.ndim} axes, {len(offsets)} offsets",
            fix="see the op's docstring",
        )
