"""The alarm: ranks that are uniform, bets that are fair, false alarms that are rare."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest

from specctl.watch.alarm import PRIOR, SHIFTS, likeliest_change, p_values, start_prior, wealth


class Half:
    """A generator whose every draw is one half, so that ties stand in the middle."""

    def random(self, number: int) -> np.ndarray:
        return np.full(number, 0.5)


def plain_p(values: list[float], index: int, draw: float) -> float:
    """The definition: the share of values up to `index` that are larger, of equals a drawn part."""
    before = values[: index + 1]
    larger = sum(value > values[index] for value in before)
    equal = sum(value == values[index] for value in before)
    return (larger + draw * equal) / len(before)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_those_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, rng.integers(1, 30), rng.integers(1, 70)).astype(float)
    split = int(rng.integers(0, len(values)))
    draws = np.random.default_rng(seed + 1).random(len(values))
    found = p_values(values[:split], values[split:], np.random.default_rng(seed + 1))
    wanted = [plain_p(values.tolist(), at, draws[at]) for at in range(split, len(values))]
    assert found.tolist() == pytest.approx(wanted)


def test_prompts_without_a_figure_count_for_nobody() -> None:
    rng = np.random.default_rng
    whole = p_values(np.array([1.0, 3.0]), np.array([2.0, 4.0]), rng(0))
    gaps = p_values(np.array([1.0, np.nan, 3.0]), np.array([np.nan, 2.0, np.nan, 4.0]), rng(0))
    assert np.isnan(gaps[[0, 2]]).all()
    assert gaps[[1, 3]].tolist() == whole.tolist()


def test_over_all_orders_the_ranks_are_uniform_and_independent() -> None:
    """Of 5 distinct values in 120 orders every pair of the last two ranks is equally frequent."""
    orders = [
        p_values(np.array(order[:3], float), np.array(order[3:], float), Half())  # type: ignore[arg-type]
        for order in permutations(range(5))
    ]
    seen = {tuple(np.round(one, 9)) for one in orders}
    counts = [sum(tuple(np.round(one, 9)) == key for one in orders) for key in seen]
    assert len(seen) == 4 * 5
    assert set(counts) == {6}


def test_stakes_are_shares_of_one_that_fall_slowly() -> None:
    stakes = start_prior(100_000)
    assert (stakes > 0).all()
    assert (np.diff(stakes) < 0).all()
    assert stakes.sum() < 1
    assert 1 - stakes.sum() == pytest.approx(1 / math.log2(1 + (PRIOR + 100_000) / PRIOR))


def test_wealth_is_what_its_bets_come_to_one_by_one() -> None:
    """Every start and shift by itself: stake x product of likelihood ratios of normal scores."""
    from statistics import NormalDist

    p = np.array([0.3, 0.01, np.nan, 0.2, 0.9])
    stakes, shifts = start_prior(5), (*SHIFTS, *(-shift for shift in SHIFTS))
    for n in range(5):
        total = 1 - sum(stakes[: n + 1])
        for start in range(n + 1):
            for shift in shifts:
                bet = stakes[start] / len(shifts)
                for one in p[start : n + 1]:
                    if not math.isnan(one):
                        z = NormalDist().inv_cdf(1 - one)
                        bet *= math.exp(shift * z - shift**2 / 2)
                total += bet
        assert wealth(p)[n] == pytest.approx(total)


def test_evidence_of_a_long_change_stays_a_number() -> None:
    found = wealth(np.full((3000, 2), 1e-9))
    assert np.isfinite(found).all()
    assert found[-1].min() > 1e90


def test_bets_are_fair_on_uniform_ranks() -> None:
    """The mean over a fine grid of the next rank is the wealth before it."""
    grid = (np.arange(200_000) + 0.5) / 200_000
    before = np.array([0.2, 0.05])
    p = np.column_stack([np.repeat(before[:, None], len(grid), 1).T, grid]).T
    assert wealth(p)[-1].mean() == pytest.approx(wealth(before)[-1], rel=2e-3)


def test_false_alarms_are_as_rare_as_promised_and_changes_are_found() -> None:
    """300 streams of tied, skewed figures; the bound of a binomial at 5 % is 8.7 % at 3 sigma."""
    rng = np.random.default_rng(7)
    figures = np.round(rng.exponential(2.0, (300, 500)), 1)
    p = np.stack([p_values(row[:150], row[150:], rng) for row in figures], 1)
    assert (wealth(p).max(0) >= 20).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
    figures[:, 300:] *= 1.6
    p = np.stack([p_values(row[:150], row[150:], rng) for row in figures[:60]], 1)
    rung = wealth(p) >= 20
    delay = np.where(rung.any(0), rung.argmax(0) - 150, 500)
    assert np.median(delay) < 80
    starts = [likeliest_change(p[:, at]).start for at in range(60)]
    assert abs(np.median(starts) - 150) < 10
    assert np.mean([likeliest_change(p[:, at]).shift > 0 for at in range(60)]) > 0.95
