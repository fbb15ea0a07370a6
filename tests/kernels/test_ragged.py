"""`pack_ragged` and `unpack_ragged` against the loop that the docstring spells out."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specctl.kernels.ragged import pack_ragged, unpack_ragged


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7),
    st.integers(0, 3),
    st.sampled_from([torch.int64, torch.float32, torch.bool]),
)
def test_pack_and_unpack_equal_the_loop(sizes: list[int], spare: int, dtype: torch.dtype) -> None:
    num_columns, offsets = max(sizes) + spare, offsets_of(sizes)
    generator = torch.Generator().manual_seed(sum(sizes))
    values = torch.randint(0, 100, (len(sizes), num_columns, 2), generator=generator).to(dtype)
    packed = pack_ragged(values, offsets, sum(sizes))
    expected = torch.full((sum(sizes), 2), 9).to(dtype)
    for row, (start, size) in enumerate(zip(offsets.tolist(), sizes, strict=False)):
        expected[start : start + size] = values[row, :size]
    assert packed.dtype == dtype
    assert torch.equal(packed, expected)
    back = unpack_ragged(packed, offsets, num_columns)
    own = torch.arange(num_columns) < torch.tensor(sizes)[:, None]
    assert torch.equal(back, values * own[..., None])


def test_unpacking_writes_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was not written would show: fresh memory is poisoned first."""
    monkeypatch.setattr(torch, "empty", lambda *size, **_: torch.full(size, float("nan")))
    found = unpack_ragged(torch.ones(3, 2), offsets_of([1, 0, 2]), 4)
    assert found.sum() == 6
    assert found.shape == (3, 4, 2)


def test_entries_without_further_axes() -> None:
    assert pack_ragged(torch.tensor([[1, 2], [3, 4]]), offsets_of([1, 2]), 3).tolist() == [1, 3, 4]
