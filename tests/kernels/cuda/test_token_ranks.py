"""The fused `token_ranks` on a GPU, at the sizes of real rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specctl.kernels.dispatch import forced
from specctl.kernels.token_ranks import token_ranks
from tests.kernels.cases_token_ranks import DTYPES, REGIMES, check, moved, random_rows
from tests.kernels.cuda.capture import CUDA, captured, overwrite

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with forced("fused"):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_the_definition(regime: str, dtype: torch.dtype) -> None:
    check(moved(REGIMES[regime](), CUDA, dtype))


@pytest.mark.parametrize("num_rows", [60, 600])
def test_real_shapes(num_rows: int) -> None:
    check(moved(random_rows(128_256, 10, num_rows), CUDA, torch.bfloat16))


def test_a_graph_sees_what_is_overwritten() -> None:
    rows = moved(random_rows(32_000, 10), CUDA, torch.bfloat16)
    graph, found = captured(lambda: token_ranks(*rows))
    fresh = moved(random_rows(32_000, 10, seed=1), CUDA, torch.bfloat16)
    overwrite(list(rows), list(fresh))
    graph.replay()
    for mine, theirs in zip(found, token_ranks(*fresh), strict=True):
        assert torch.equal(mine, theirs)
