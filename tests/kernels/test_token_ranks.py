"""The reference of `token_ranks` against its definition."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.token_ranks import token_ranks
from tests.kernels.cases_token_ranks import DTYPES, REGIMES, check, moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_the_definition(regime: str, dtype: torch.dtype) -> None:
    check(moved(REGIMES[regime](), torch.device("cpu"), dtype))


def test_hand_worked() -> None:
    found = token_ranks(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), torch.tensor([[2, 3, -1]]))
    assert found.top_two.tolist() == [[3, 3]]
    assert found.logits.tolist() == [[3, 0, 0]]
    assert found.num_larger.tolist() == [[0, 3, 0]]
    assert found.log_sum_exp.item() == pytest.approx(3.7817, abs=1e-4)


def test_bad_input_is_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(UsageError, match=r"tokens: .* of 2 x any, found int64 of 1 x 3"):
        token_ranks(x, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(UsageError, match="tokens: expected int64"):
        token_ranks(x, x)
    with pytest.raises(UsageError, match="logits: expected float32 or float16 or bfloat16"):
        token_ranks(x.double(), torch.zeros(2, 1, dtype=torch.int64))
