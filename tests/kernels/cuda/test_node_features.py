"""The fused `node_features` on a GPU, at the sizes of real vocabularies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specctl.kernels.dispatch import forced
from specctl.kernels.node_features import node_features
from tests.kernels.cases_node_features import (
    DTYPES,
    REGIMES,
    check,
    check_negative_nan,
    check_spoilt,
    drawn,
    spoilt_rows,
)
from tests.kernels.cuda.capture import CUDA, captured, overwrite

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with forced("fused"):
        yield


def real_rows(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator(CUDA).manual_seed(seed)
    return (4 * torch.randn(num_rows, vocab_size, generator=draw, device=CUDA)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_float64(regime: str, dtype: torch.dtype) -> None:
    logits = drawn(regime, dtype, CUDA)
    check(logits, min(3, logits.shape[-1]), 4)


@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 151_936])
@pytest.mark.parametrize("num_rows", [8, 60, 240, 600])
def test_real_shapes(num_rows: int, vocab_size: int) -> None:
    check(real_rows(num_rows, vocab_size, torch.bfloat16), 8, 10)


@pytest.mark.parametrize("top_k", [1, 32])
@pytest.mark.parametrize("vocab_size", [128_257, 262_144, 1 << 20])
def test_lists_and_vocabularies_at_the_limit(vocab_size: int, top_k: int) -> None:
    check(real_rows(3, vocab_size, torch.float32), top_k, top_k)


def test_strided_rows() -> None:
    check(real_rows(8, 4099, torch.bfloat16)[::2, 3:4001], 4, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_spoilt_rows(value: float) -> None:
    check_negative_nan(CUDA)
    check_spoilt(spoilt_rows(value).to(CUDA))


def test_a_graph_sees_what_is_overwritten() -> None:
    logits = real_rows(60, 32_000, torch.bfloat16)
    graph, found = captured(lambda: node_features(logits, 8, 10))
    for seed in (1, 2):
        overwrite([logits], [real_rows(60, 32_000, torch.bfloat16, seed)])
        graph.replay()
        for there, wanted in zip(found, node_features(logits, 8, 10), strict=True):
            assert torch.equal(there, wanted)
