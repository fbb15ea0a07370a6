"""Statistics: every figure against its definition or another library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import BaseModel
from sklearn.metrics import roc_auc_score

from specctl.stats import UNKNOWN, Interval, auc_of, calibration_errors


class Holder(BaseModel):
    model_config = {"frozen": True, "strict": True, "allow_inf_nan": False}
    found: Interval


def test_an_interval_is_null_in_json_where_it_is_not_defined() -> None:
    text = Holder(found=Interval(1.0, math.nan, 2.0)).model_dump_json()
    assert text == '{"found":{"value":1.0,"low":null,"high":2.0}}'
    assert math.isnan(Holder.model_validate_json(text).found.low)
    assert UNKNOWN.text() == "-"
    assert Interval(1.0, 0.5, math.nan).text(".1f") == "1.0 [0.5, -]"


@pytest.mark.parametrize("levels", [3, 1000], ids=["tied", "distinct"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_area_is_that_of_another_library(levels: int, *, weighted: bool) -> None:
    random = np.random.default_rng(0)
    score = random.integers(0, levels, 200) / levels
    label = random.random(200) < score
    weight = random.random(200) if weighted else None
    assert auc_of(score, label, weight) == pytest.approx(
        roc_auc_score(label, score, sample_weight=weight)
    )


def test_the_area_is_not_known_with_one_class() -> None:
    assert math.isnan(auc_of(np.arange(3.0), np.ones(3, bool)))


def test_the_debiased_error_of_perfect_probabilities_is_about_zero() -> None:
    """Chance adds 4e-4 to the mean square over 15 bins of 400 nodes, and must be taken out."""
    random = np.random.default_rng(0)
    prob = np.linspace(0.1, 0.9, 15)
    squares, plain = [], []
    for _ in range(200):
        count = np.full(15, 400.0)
        positive = random.binomial(400, prob).astype(float)
        debiased, mean_gap = calibration_errors(count, positive, prob * count)
        squares.append(debiased**2)
        plain.append(mean_gap)
    assert np.mean(squares) < 2e-4
    assert np.mean(plain) > 1e-2, "chance alone keeps the plain error above 0"
