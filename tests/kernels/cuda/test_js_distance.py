"""The fused `js_distance` on a GPU, at the sizes of real vocabularies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specctl.kernels.dispatch import forced
from specctl.kernels.js_distance import js_distance
from tests.kernels.cases_js_distance import (
    DTYPES,
    REGIMES,
    Laws,
    check,
    check_nan,
    moved,
    random_laws,
)
from tests.kernels.cuda.capture import CUDA, captured, overwrite

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with forced("fused"):
        yield


def real_laws(num_rows: int, seed: int = 0) -> Laws:
    """A drafter of 32,000 tokens beside a target of 128,256."""
    return moved(random_laws(32_000, 128_256, num_rows, seed), CUDA, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_the_definition(regime: str, dtype: torch.dtype) -> None:
    check(moved(REGIMES[regime](), CUDA, dtype))


@pytest.mark.parametrize("num_rows", [8, 60])
def test_real_shapes(num_rows: int) -> None:
    check(real_laws(num_rows))


@pytest.mark.parametrize("side", ["draft", "target"])
def test_nan_spoils_its_row(side: str) -> None:
    check_nan(CUDA, side)


def test_a_graph_sees_what_is_overwritten() -> None:
    laws = real_laws(8)
    graph, found = captured(lambda: js_distance(laws.draft, laws.target, laws.target_ids))
    fresh = real_laws(8, seed=1)
    inputs = [laws.draft, laws.target, laws.target_ids]
    overwrite(inputs, [fresh.draft, fresh.target, fresh.target_ids])
    graph.replay()
    assert torch.equal(found, js_distance(fresh.draft, fresh.target, fresh.target_ids))
