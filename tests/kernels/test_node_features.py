"""The reference of `node_features` against float64, and what the public op promises around it."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
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

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_float64(regime: str, dtype: torch.dtype) -> None:
    logits = drawn(regime, dtype, CPU)
    check(logits, min(8, logits.shape[-1]), 10)


@pytest.mark.parametrize("num_values", [2, 40, 1000])
@pytest.mark.parametrize("top_k", [1, 9, 60])
def test_ties_go_to_the_lower_id(top_k: int, num_values: int) -> None:
    """Ties within the list, at its end, and more of them than the reference looks at first."""
    draw = torch.Generator().manual_seed(num_values)
    check(torch.randint(num_values, (4, 200), generator=draw).float(), top_k, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_spoilt_rows(value: float) -> None:
    check_negative_nan(CPU)
    check_spoilt(spoilt_rows(value))


def test_log_probabilities_are_at_most_zero() -> None:
    logits = torch.tensor([[100.0, -100.0, -100.0], [0.0, 0.0, 0.0]])
    found = node_features(logits, top_k=2, entropy_top_k=10)
    assert bool((found.top_logp <= 0).all())
    assert found.top_logp[0, 0] == 0.0
    assert float(found.entropy[1]) == pytest.approx(1.0986123)


def test_entropy_top_k_is_clipped_to_the_vocabulary() -> None:
    found = node_features(torch.zeros(1, 4), top_k=4, entropy_top_k=10)
    torch.testing.assert_close(found.entropy, found.topk_entropy)


def test_margin_and_ratio() -> None:
    logits = torch.tensor([[4.0, 1.0, 3.0], [2.0, -1.0, -3.0], [-1.0, -3.0, -2.0], [0.0, 0.0, 0.0]])
    found = node_features(logits, 1, 1)
    assert found.margin.tolist() == [1, 3, 1, 0]
    never = float("-inf")  # a ratio of 2 in the third row would pass any threshold
    assert found.ratio.tolist() == [0.75, never, never, never]
    alone = node_features(torch.tensor([[3.0]]), 1, 1)
    assert (alone.margin.item(), alone.ratio.item()) == (float("inf"), never)


def test_bad_input_is_refused() -> None:
    x = torch.zeros(2, 5)
    with pytest.raises(UsageError, match="expected float32, float16 or bfloat16, found int64"):
        node_features(x.long(), 1, 1)
    with pytest.raises(UsageError, match="top_k: expected at most 5, found 6"):
        node_features(x, 6, 1)
    with pytest.raises(UsageError, match="expected at least 1, found 1 and 0"):
        node_features(x, 1, 0)
