"""The fused `js_distance` as Python."""

from __future__ import annotations

import pytest
import torch

from specctl.errors import UsageError
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

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_the_definition(regime: str, dtype: torch.dtype) -> None:
    check(moved(REGIMES[regime](), CPU, dtype))


def test_a_real_vocabulary() -> None:
    check(moved(random_laws(32_000, 128_256, num_rows=1), CPU, torch.bfloat16))


def test_ends_of_the_scale() -> None:
    """Both ends, to the root of float32's rounding."""
    assert bool((check(REGIMES["equal"]()) < 1e-3).all())
    assert check(REGIMES["cut"]())[2] == pytest.approx(1, abs=1e-6)


def test_strides_dtypes_and_no_rows() -> None:
    laws = random_laws(64, 500, num_rows=4)
    mixed = Laws(laws.draft[::2].half(), laws.target[1:3, :], laws.target_ids)
    check(mixed)
    wide = torch.stack([laws.target, laws.target], -1)
    check(Laws(laws.draft, wide[..., 0], torch.stack([laws.target_ids] * 2, 1)[:, 0]))
    assert js_distance(laws.draft[:0], laws.target[:0], laws.target_ids).shape == (0,)


@pytest.mark.parametrize("side", ["draft", "target"])
def test_nan_spoils_its_row(side: str) -> None:
    check_nan(CPU, side)


def test_a_vocabulary_without_room_is_refused() -> None:
    zero, ids = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UsageError, match="vocabulary: expected at most 1048576"):
        js_distance(zero, zero.expand(1, 1 << 20 | 1), ids)
