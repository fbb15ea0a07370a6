"""The fused compaction as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.commit_kv import commit_kv
from tests.kernels.cases_commit_kv import DTYPES, SHAPES, check_commit

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_steps", [1, 6, 16, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_loop(shape: str, num_steps: int) -> None:
    """Forty steps are three of the kernel's chunks: later ones read below earlier writes."""
    for seed in range(2):
        check_commit(SHAPES[shape], num_steps, torch.float32, CPU, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype) -> None:
    check_commit(SHAPES["odd head"], 20, dtype, CPU, 7)


def test_bits_move_as_they_are() -> None:
    """NaN with a payload, negative zero and denormals of half precision."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    storage = bits.view(torch.float16).reshape(1, 1, 1, 512, 128).clone()
    commit_kv(storage, torch.tensor([3]), torch.tensor([[0, 4, 9, 300]]))
    rows = bits.reshape(512, 128).clone()
    rows[[4, 5, 6]] = rows[[7, 12, 303]]
    assert torch.equal(storage.view(torch.int16).reshape(512, 128), rows)


def test_nothing_to_move() -> None:
    storage = torch.ones(2, 1, 2, 4, 3)
    commit_kv(storage, torch.tensor([0]), torch.zeros(1, 0, dtype=torch.int64))
    commit_kv(storage[:, :0], torch.zeros(0).long(), torch.zeros(0, 3).long())
    assert bool((storage == 1).all())


def test_complex_numbers_are_refused() -> None:
    storage = torch.zeros(1, 1, 1, 2, 2, dtype=torch.complex128)
    with pytest.raises(UsageError, match=r"a dtype of 1, 2, 4 or 8 bytes, found torch\.complex128"):
        commit_kv(storage, torch.tensor([0]), torch.tensor([[0]]))
