"""Packing and unpacking against the loop of the docstring, on any device."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from specctl.kernels.ragged import pack_ragged, unpack_ragged
from tests.kernels.poison import poisoned

SIZES = {
    "uneven": [3, 0, 7, 1],
    "one row": [5],
    "empty ends": [0, 4, 0, 0],
    "all empty": [0, 0],
    "long": [300, 1, 260],
}
TRAILING = [(), (1,), (5,), (2, 3), (64,), (1100,)]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def packed_by_loop(values: Tensor, sizes: list[int]) -> Tensor:
    rows = [row[:size] for row, size in zip(values, sizes, strict=True)]
    return torch.cat(rows)


def unpacked_by_loop(packed: Tensor, sizes: list[int], num_columns: int) -> Tensor:
    values = torch.zeros(len(sizes), num_columns, *packed.shape[1:], dtype=packed.dtype)
    for row, part in enumerate(packed.split(sizes)):
        values[row, : len(part)] = part
    return values


def check_ragged(
    sizes: list[int],
    trailing: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    spare: int = 2,
) -> None:
    """Both ways, of values that are not contiguous, behind poisoned outputs."""
    offsets = torch.tensor([0, *accumulate(sizes)]).to(device)
    draw = torch.Generator().manual_seed(len(sizes) + sum(trailing))
    shape = (len(sizes) + 1, max(sizes) + spare + 1, *trailing)
    whole = torch.randint(0, 100, shape, generator=draw).to(dtype)
    values = whole[1:, 1:]
    expected = packed_by_loop(values, sizes)
    with poisoned():
        packed = pack_ragged(whole.to(device)[1:, 1:], offsets, sum(sizes))
        back = unpack_ragged(packed, offsets, values.shape[1])
    assert packed.dtype == back.dtype == dtype
    assert torch.equal(packed.cpu(), expected)
    assert torch.equal(back.cpu(), unpacked_by_loop(expected, sizes, values.shape[1]))
