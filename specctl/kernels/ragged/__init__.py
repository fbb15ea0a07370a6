"""`pack_ragged`, `unpack_ragged`: rows of different sizes end to end on one axis, and back."""

from __future__ import annotations

from torch import Tensor

from specctl.kernels.ragged import reference


def pack_ragged(values: Tensor, offsets: Tensor, num_packed: int) -> Tensor:
    """Lays the first entries of every row end to end.

    In words a reader can execute:

        for b in range(B):
            packed[offsets[b] : offsets[b + 1]] = values[b, : offsets[b + 1] - offsets[b]]

    Args:
        values: `[B, N, ...]`.
        offsets: `[B + 1]` int64, ascending from 0: where each row starts, and the end.
        num_packed: T, the last of them, known to the caller so that no device is asked.

    Returns:
        `[T, ...]`.
    """
    return reference.pack_ragged(values, offsets, num_packed)


def unpack_ragged(packed: Tensor, offsets: Tensor, num_columns: int) -> Tensor:
    """The inverse of `pack_ragged`; what lies behind a row's own entries is 0.

    Args:
        packed: `[T, ...]`. offsets: as above. num_columns: N, at least the largest row.

    Returns:
        `[B, N, ...]`.
    """
    return reference.unpack_ragged(packed, offsets, num_columns)
