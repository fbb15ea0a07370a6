"""The fused `token_ranks` as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
from specctl.kernels.token_ranks import token_ranks
from tests.kernels.cases_token_ranks import DTYPES, REGIMES, Rows, check, moved, random_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_the_definition(regime: str, dtype: torch.dtype) -> None:
    check(moved(REGIMES[regime](), torch.device("cpu"), dtype))


def test_a_real_vocabulary() -> None:
    rows = random_rows(128_256, 10, num_rows=2)
    rows.tokens[1] = torch.arange(10)
    check(moved(rows, torch.device("cpu"), torch.bfloat16))


def test_strides_and_no_rows() -> None:
    rows = random_rows(500, 6, num_rows=6)
    check(Rows(rows.logits[::2], torch.stack([rows.tokens[:3]] * 2, 2)[..., 0]))
    check(Rows(torch.stack([rows.logits] * 2, 2)[..., 0], rows.tokens))
    assert token_ranks(rows.logits[:0], rows.tokens[:0]).num_larger.shape == (0, 6)


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(UsageError, match="tokens: expected at most 32, found 33"):
        token_ranks(torch.zeros(1, 3), torch.zeros(1, 33, dtype=torch.int64))
