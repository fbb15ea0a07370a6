"""The fused race as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.kernels import race as public
from specctl.kernels.dispatch import forced
from specctl.kernels.race import fused, race
from tests.kernels.cases_race import check_race, random_laws

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", public.DTYPES)
@pytest.mark.parametrize("vocab_size", [5, 1024, 1025, 4100])
def test_equals_the_definition(vocab_size: int, dtype: torch.dtype) -> None:
    check_race(9, vocab_size, dtype, CPU)


def test_a_real_vocabulary_and_few_rows() -> None:
    law, keys, greedy = random_laws(0, 4, 32_000, torch.float32)
    found = race(law, keys, greedy)
    with forced("reference"):
        assert torch.equal(found, race(law, keys, greedy))


@pytest.mark.parametrize("programs", [1, 16, 10_000])
def test_every_split_draws_the_same(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "PROGRAMS", programs)
    check_race(5, 6000, torch.float32, CPU)


def test_edges() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert race(torch.zeros(0, 7), none, none.bool()).shape == (0,)
    nothing = torch.full((2, 2000), float("-inf"))
    assert race(nothing, torch.tensor([1, 2]), torch.tensor([True, False])).tolist() == [0, 0]
    spread = torch.eye(8)[:, ::2]
    assert race(spread, torch.zeros(8).long(), torch.ones(8) > 0).tolist()[:3] == [0, 0, 1]
