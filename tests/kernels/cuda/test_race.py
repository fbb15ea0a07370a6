"""The fused race on a GPU."""

from __future__ import annotations

import pytest
import torch

from specctl.kernels.dispatch import forced
from specctl.kernels.race import DTYPES, race
from tests.kernels.cases_race import check_race, random_laws
from tests.kernels.cuda.capture import CUDA, captured, overwrite

pytestmark = pytest.mark.cuda
VOCABULARIES = (32_000, 128_256, 151_936)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [5, 1025, 4100])
def test_equals_the_definition(vocab_size: int, dtype: torch.dtype) -> None:
    with forced("fused"):
        check_race(9, vocab_size, dtype, CUDA)


@pytest.mark.parametrize("num_rows", [8, 60, 240])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_gpu_draws_what_a_cpu_draws(vocab_size: int, num_rows: int) -> None:
    """Logarithms may differ in their last bit, so the two first would have to be that near."""
    given = random_laws(vocab_size, num_rows, vocab_size, torch.bfloat16)
    with forced("fused"):
        found = race(*(part.to(CUDA) for part in given))
    expected = [race(*(part[row : row + 8] for part in given)) for row in range(0, num_rows, 8)]
    assert torch.equal(found.cpu(), torch.cat(expected))


def test_a_graph_sees_what_is_overwritten() -> None:
    given = random_laws(0, 24, 32_000, torch.float32)
    inputs = [part.to(CUDA) for part in given]
    with forced("fused"):
        graph, ids = captured(lambda: race(*inputs))
    for seed in (1, 2):
        fresh = random_laws(seed, 24, 32_000, torch.float32)
        overwrite(inputs, fresh)
        graph.replay()
        assert torch.equal(ids.cpu(), race(*fresh))
