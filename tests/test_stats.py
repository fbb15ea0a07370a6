"""Statistics: every figure against its definition or another library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from sklearn.metrics import roc_auc_score

from specctl.errors import TraceEmptyError
from specctl.stats import (
    UNKNOWN,
    Interval,
    Resamples,
    auc,
    boosted_trees,
    calibration_errors,
    first_over_second,
    paired_difference,
    ratio_of_ratios,
    ratio_of_sums,
    recovery_ratio,
    share,
    split_prompts,
    swap_p_value,
)


class Holder(BaseModel):
    model_config = {"frozen": True, "strict": True, "allow_inf_nan": False}
    found: Interval


def test_an_interval_is_null_in_json_where_it_is_not_defined() -> None:
    text = Holder(found=Interval(1.0, math.nan, 2.0)).model_dump_json()
    assert text == '{"found":{"value":1.0,"low":null,"high":2.0}}'
    assert math.isnan(Holder.model_validate_json(text).found.low)
    assert not UNKNOWN.known


def test_the_area_is_that_of_another_library() -> None:
    """Of counts by ascending score, ties among them."""
    random = np.random.default_rng(0)
    score = random.integers(0, 7, 200)
    label = random.random(200) < score / 7
    counts = (np.bincount(score[side], minlength=7) for side in (label, ~label))
    assert auc(*counts) == pytest.approx(roc_auc_score(label, score))
    assert math.isnan(auc(np.ones(3), np.zeros(3)))


def law(x: np.ndarray) -> np.ndarray:
    """Acceptance rises with the first feature, and with the second where that is known."""
    return 1 / (1 + np.exp(-(x[:, 0] + np.nan_to_num(x[:, 1]) - 1)))


def test_boosted_trees_find_a_law_of_two_features_and_its_gaps() -> None:
    """Rejected rows are kept at a fifth, and weigh five: without weights the mean is 0.3 off."""
    random = np.random.default_rng(0)
    x = random.normal(size=(40_000, 2)).astype(np.float32)
    x[::3, 1] = np.nan
    label = random.random(len(x)) < law(x)
    kept = label | (random.random(len(x)) < 0.2)
    weight = np.where(label, 1.0, 5.0)[kept]
    fit = boosted_trees(x[kept], label[kept], weight=weight, seed=0)
    again = boosted_trees(x[kept], label[kept], weight=weight, seed=0)
    unseen = x[:300] * np.float32(0.9)
    assert np.array_equal(fit(unseen), again(unseen))
    assert abs(fit(unseen) - law(unseen)).mean() < 0.04
    plain = boosted_trees(x[kept], label[kept], seed=0)
    assert (plain(unseen) - law(unseen)).mean() > 0.2


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


# --------------------------------------------------------------------------- intervals


def coverage(
    draw: Callable[[np.random.Generator], tuple[Any, ...]],
    figure: Callable[..., Interval],
    truth: float,
    num: int = 1000,
) -> float:
    generator, inside = np.random.default_rng(0), 0
    for _ in range(num):
        found = figure(*draw(generator))
        inside += found.low <= truth <= found.high
    return inside / num


def test_intervals_cover_what_they_should() -> None:
    """95 % intervals over 120 prompts: 1000 repetitions tell 0.95 from 0.92 (four deviations)."""

    def sums(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        calls = generator.integers(5, 40, 120).astype(float)
        return generator.poisson(3 * calls).astype(float), calls

    def answers(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        fate = generator.random(120)
        return (fate < 0.57).astype(float), (fate > 0.03).astype(float) * (fate < 0.63)

    assert 0.92 < coverage(sums, ratio_of_sums, 3.0) < 0.98
    ours = coverage(answers, recovery_ratio, 0.57 / 0.6)
    net = coverage(lambda g: (np.subtract(*answers(g)),), paired_difference, -0.03)
    assert 0.92 < ours <= 1
    assert 0.92 < net <= 1

    def two(generator: np.random.Generator) -> tuple[Any, Any]:
        a, b = sums(generator)
        return (a, b), (generator.poisson(2 * b).astype(float), b)

    assert 0.92 < coverage(two, ratio_of_ratios, 1.5) < 0.98


def test_no_difference_among_few_prompts_is_not_certainty() -> None:
    found = paired_difference(np.zeros(20))
    assert found.value == 0
    assert found.low < -0.05


def test_figures_without_data_are_unknown() -> None:
    nothing = np.zeros(3)
    assert not recovery_ratio(np.ones(3), nothing).known
    assert not ratio_of_sums(np.ones(3), nothing).known
    assert not share(0, 0).known


# --------------------------------------------------------------------------- splits

PROMPTS = [f"prompt-{i}" for i in range(1000)]


@pytest.mark.parametrize(("num", "least"), [(2, 1), (15, 1), (16, 8), (30, 8), (100, 8)])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_eight_prompts_stand_on_a_side_where_there_are_sixteen(
    num: int, least: int, share: float
) -> None:
    for seed in range(20):
        split = split_prompts(PROMPTS[:num], held_out_frac=share, seed=seed)
        assert min(len(split.train), len(split.held_out)) >= least
        wider = split_prompts(PROMPTS[:num], held_out_frac=min(0.99, 2 * share), seed=seed)
        assert set(split.held_out) <= set(wider.held_out), "a smaller side lies within a larger"


def test_same_seed_same_split_in_any_order() -> None:
    once = split_prompts(PROMPTS, held_out_frac=0.2, seed=7)
    assert once == split_prompts(reversed(PROMPTS * 2), held_out_frac=0.2, seed=7)
    assert once != split_prompts(PROMPTS, held_out_frac=0.2, seed=8)


def test_split_is_the_same_on_every_machine() -> None:
    split = split_prompts(["a", "b", "c", "d", "e", "f"], held_out_frac=0.4, seed=1)
    # sha256 of "1:a" to "1:f" begins 41, 6f, b8, 24, 69, 61: held out below 0.4, so below 0x66
    assert split.held_out == ("a", "d", "f")


def test_new_prompts_move_no_old_one() -> None:
    before = split_prompts(PROMPTS[:500], held_out_frac=0.3, seed=0)
    after = split_prompts(PROMPTS, held_out_frac=0.3, seed=0)
    assert set(before.train) < set(after.train)
    assert set(before.held_out) < set(after.held_out)


@pytest.mark.parametrize("prompts", [[], ["only"], ["only", "only"]])
def test_fewer_than_two_prompts_are_refused(prompts: list[str]) -> None:
    with pytest.raises(TraceEmptyError, match="at least 2 prompts"):
        split_prompts(prompts, held_out_frac=0.5, seed=0)


# --------------------------------------------------------------------------- bootstrap


def test_the_interval_of_a_mean_has_its_known_width() -> None:
    """2000 resamples estimate a standard error to 1.6%: 10% off would be 6 of its errors."""
    values = np.random.default_rng(0).normal(10, 2, (400, 1))
    counted = np.concatenate([values, np.ones_like(values)], 1)
    found = Resamples.draw(400).interval(counted, lambda s: s[..., 0] / s[..., 1])
    half = 1.96 * values.std() / 20
    assert found.value == values.mean()
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.1)


def test_pairing_removes_what_prompts_share() -> None:
    rng = np.random.default_rng(1)
    hard = rng.lognormal(0, 1, (200, 1))
    ours, theirs = 1.1 * hard + rng.normal(0, 0.01, hard.shape), hard
    resamples = Resamples.draw(200)
    paired = resamples.ratio(ours, theirs, lambda s: s[..., 0])
    alone = resamples.interval(ours, lambda s: s[..., 0])
    assert paired.low < 1.1 < paired.high
    assert (paired.high - paired.low) / paired.value < 0.1 * (alone.high - alone.low) / alone.value


# --------------------------------------------------------------------------- swaps


def test_swaps_of_two_prompts_by_hand() -> None:
    """Of 4 swaps the one seen and its mirror image are the furthest apart."""
    ours, theirs = np.array([[4.0, 1.0], [4.0, 1.0]]), np.array([[4.0, 2.0], [4.0, 2.0]])
    assert swap_p_value(ours, theirs, first_over_second) == 0.5
    assert swap_p_value(ours, ours, first_over_second) == 1.0


@pytest.mark.parametrize("num_prompts", [8, 20])
def test_swaps_ring_as_often_as_they_say(num_prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of the same distribution, paired and heavy-tailed: p is at most .05 in 5 of 100; 1,000
    streams would show .07. Of 20 prompts 1,000 swaps are drawn, not 20,000."""
    monkeypatch.setattr("specctl.stats.NUM_SWAPS", 1000)
    rng, found = np.random.default_rng(0), []
    for _ in range(1000):
        prompt = rng.pareto(2, (num_prompts, 1)) + 1
        sums = [np.hstack([prompt, prompt * rng.lognormal(0, 0.3, prompt.shape)]) for _ in range(2)]
        found.append(swap_p_value(*sums, first_over_second))
    assert np.mean(np.array(found) <= 0.05) < 0.07
    assert np.mean(np.array(found) <= 0.5) > 0.4
