"""The fused `node_features` as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.node_features import fused, node_features
from tests.kernels.cases_node_features import (
    DTYPES,
    REGIMES,
    check,
    check_negative_nan,
    check_spoilt,
    drawn,
    spoilt_rows,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_float64(regime: str, dtype: torch.dtype) -> None:
    logits = drawn(regime, dtype, CPU)
    check(logits, min(3, logits.shape[-1]), 4)


@pytest.mark.parametrize(("top_k", "entropy_top_k"), [(1, 1), (32, 10)])
def test_lists_of_every_length(top_k: int, entropy_top_k: int) -> None:
    check(drawn("ties", torch.bfloat16, CPU)[:1], top_k, entropy_top_k)


@pytest.mark.parametrize("block", fused.BLOCKS)
def test_every_cut(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BLOCKS", (block,))
    check(drawn("masked", torch.float16, CPU), 4, 4)


@pytest.mark.parametrize("vocab_size", [32_000, 70_001, 262_145])
def test_large_vocabularies(vocab_size: int) -> None:
    x = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0))
    x[0, -1] = x[0, 40] = x.max()
    check(x.bfloat16(), 4, 4)


def test_strided_and_empty_rows() -> None:
    base = torch.randn(2, 3, 700, generator=torch.Generator().manual_seed(2))
    check(base[:, 1:2, 13:500], 2, 2)
    check(base[0, :1, ::3], 2, 2)
    check(base.transpose(1, 2)[:1, :2, :], 2, 2)
    found = node_features(torch.zeros(0, 4, 50), 3, 3)
    assert [tuple(field.shape) for field in found[:2]] == [(0, 4, 3)] * 2
    assert found.entropy.shape == (0, 4)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf - inf
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_spoilt_rows(value: float) -> None:
    check_negative_nan(CPU)
    check_spoilt(spoilt_rows(value))


def test_what_has_no_room_is_refused() -> None:
    with pytest.raises(UsageError, match="top_k: expected at most 32, found 33"):
        node_features(torch.zeros(1, 64), 33, 1)
    with pytest.raises(UsageError, match="vocabulary: expected at most 1048576"):
        node_features(torch.zeros(1, 1 << 20 | 1), 1, 1)
    with pytest.raises(UsageError, match="leaves"):
        node_features(torch.zeros(1, 1).expand(1 << 20, 1 << 18), 1, 1)
