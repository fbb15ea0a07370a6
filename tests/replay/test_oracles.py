"""Walks, the clairvoyant and the best trees against recursion and enumeration."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.replay.cost.model import Steps
from specctl.replay.ladder import limits
from specctl.replay.metrics import LoadClock, request_sums
from specctl.replay.outcomes import Outcomes
from specctl.replay.rounds import least_cost, walk_outcomes
from tests.replay.costs import linear_clock, table_model
from tests.replay.serving import positions_of

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@given(LENGTHS, st.sampled_from([1, -1]), st.randoms(use_true_random=False))
def test_the_programme_is_the_extreme_over_all_walks(
    lengths: list[int], sign: int, random: Any
) -> None:
    """The least sum of costs; of negative costs, the most."""
    positions, rows = positions_of(lengths), sum(lengths)
    low = np.array([random.randint(1, 3) for _ in range(rows)], np.int32)
    high = low + np.array([random.randint(0, 3) for _ in range(rows)], np.int32)
    cost = sign * np.array([[random.randint(0, 9) for _ in range(4)] for _ in range(rows)], float)
    ends = np.repeat(positions.start[1:], np.diff(positions.start))

    def by_way(row: int, emitted: int) -> float:
        after = best(row + emitted) if row + emitted < ends[row] else 0.0
        return float(cost[row, emitted - low[row]] + after)

    @cache
    def best(row: int) -> float:
        return min(by_way(row, emitted) for emitted in range(low[row], high[row] + 1))

    total, emitted = least_cost(positions, cost, low, high)
    assert total.tolist() == [best(row) for row in range(rows)]
    assert ((low <= emitted) & (emitted <= high)).all()
    assert [by_way(row, int(emitted[row])) for row in range(rows)] == total.tolist()


def test_a_request_of_a_batch_pays_its_share() -> None:
    """Fixed costs are shared by four, costs by token are not."""
    us = linear_clock(batch_size=4).share_us(Steps(1, 3, 0, 2, level_width=1, num_emitted=1))
    assert us == (1 + 100 + 20) / 4 + 3 * 10 + 2 * 5


def test_the_clairvoyant_by_hand() -> None:
    """Five tokens; the trees follow the text for 0, 3, 2, 1, 0 of them.

    A round of k tokens costs 111 plain, else 121 + 15 k + 10. From position 0 nothing can be
    drafted. At 1 all three draft tokens and the bonus end the text: 111 + 176. Two rounds of
    two tokens would cost 2 · 146 and are dearer.
    """
    positions = positions_of([5])
    reach = np.array([0, 3, 2, 1, 0], np.int32)
    decided = limits.clairvoyant(positions, reach, linear_clock())
    assert decided.accepted.tolist()[:2] == [0, 3]
    found = request_sums(walk_outcomes(None, positions, decided), linear_clock())
    assert [found[name].sum() for name in ("calls", "verified", "tokens")] == [2, 5, 5]
    assert found["time_us"].sum() == 111 + (1 + 100 + 40 + 20 + 15)


def test_of_equal_ways_the_one_that_drafts_less_is_taken() -> None:
    """Two plain rounds of 1, or one round of 2 that costs 2."""
    cost, limit = np.array([[1.0, 2.0], [1.0, 9.0]]), np.array([1, 0], np.int32)
    total, emitted = least_cost(positions_of([2]), cost, np.ones_like(limit), limit + 1)
    assert (total.tolist(), emitted.tolist()) == ([2.0, 1.0], [1, 1])


def test_costs_of_accepted_paths_read_nothing_at_the_end() -> None:
    taken, emitted = np.arange(3), np.array([[1, 2, 0], [1, 0, 0], [0, 0, 0]])
    clock = LoadClock(table_model())
    wanted = clock.share_us(Steps(1, taken + 1, 1, taken, level_width=1, num_emitted=emitted))
    found = limits.round_costs(positions_of([3]), np.array([2, 1, 0], np.int32), clock)
    assert found.tolist() == wanted.tolist()


Table = list[list[float]]
PARENTS = (-1, 0, 0, 1, 1, 2, 3)
"""Root; 1 and 2 below it; 3 and 4 below 1; 5 below 2; 6 below 3."""


def closed_subsets() -> list[tuple[int, ...]]:
    nodes = range(1, len(PARENTS))
    chosen = [c for size in range(len(PARENTS)) for c in combinations(nodes, size)]
    return [c for c in chosen if all(PARENTS[n] in (0, *c) for n in c)]


def depth_of(node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(PARENTS[node])


def joint(conditional: list[float]) -> list[float]:
    found = [1.0]
    for node in range(1, len(PARENTS)):
        found.append(found[PARENTS[node]] * conditional[node])
    return found


def ranked_of(contexts: Table) -> limits.Ranked:
    """One request a context, whose tree has these joint probabilities."""
    order = [sorted(range(1, len(PARENTS)), key=lambda n: (-p[n], n)) for p in contexts]
    prob = np.array([[p[n] for n in o] for p, o in zip(contexts, order, strict=True)], np.float32)
    depth = np.array([[depth_of(n) for n in o] for o in order], np.int8)
    positions = positions_of([1] * len(contexts))
    matched = np.zeros(len(contexts), np.int32)
    return limits.Ranked(positions, 2, matched, prob, depth, np.zeros(depth.shape, bool))


SIXTEENTHS = st.integers(0, 16).map(lambda n: n / 16)
CONDITIONALS = st.lists(st.lists(SIXTEENTHS, min_size=7, max_size=7), min_size=1, max_size=2)
STAIRS = st.lists(st.sampled_from([0.0, 0.0, 4.0, 16.0]), min_size=7, max_size=7)


@given(CONDITIONALS, STAIRS, st.sampled_from([0.001, 0.01, 0.03, 0.1]))
def test_the_best_tree_is_the_best_of_all_closed_subsets(
    conditionals: Table, stairs: list[float], price: float
) -> None:
    """Staircase costs by size and a cost by level: what a local rule would miss."""
    contexts = [joint(c) for c in conditionals]
    ranked = ranked_of(contexts)
    times = stair_times(ranked, stairs)
    decided = limits.best_trees(ranked, times, price)
    for row, probs in enumerate(contexts):
        worth = [1 + sum(probs[n] for n in s) - price * cost_of(s, times) for s in closed_subsets()]
        tokens, us = figures(ranked, times, decided, row)
        assert tokens - price * us == pytest.approx(max(worth), abs=1e-9)


def figures(
    ranked: limits.Ranked, times: limits.TreeTimes, decided: Outcomes, row: int
) -> tuple[float, float]:
    """Expected tokens and time of the tree that was decided on."""
    size, levels = np.asarray(decided.verified)[row] - 1, np.asarray(decided.levels)[row]
    inside = ranked.prob[row][ranked.depth[row] <= levels]
    return 1 + float(inside[:size].sum(dtype=np.float64)), float(times.us[0, levels, size])


def stair_times(ranked: limits.Ranked, stairs: list[float]) -> limits.TreeTimes:
    sizes, levels = 50 + np.cumsum(stairs), 7.0 * np.arange(4)
    us = (sizes[None, :] + levels[:, None])[None]
    return limits.TreeTimes(us, np.zeros(ranked.positions.num_rows, np.int64))


def cost_of(chosen: tuple[int, ...], times: limits.TreeTimes) -> float:
    return float(times.us[0, max((depth_of(n) for n in chosen), default=0), len(chosen)])


@given(CONDITIONALS.filter(lambda c: len(c) == 2), STAIRS)
def test_the_settled_price_gives_the_best_long_run_rate(
    conditionals: Table, stairs: list[float]
) -> None:
    """Two contexts, equally frequent: no pair of trees has a higher Σ tokens / Σ time."""
    contexts = [joint(c) for c in conditionals]
    ranked = ranked_of(contexts)
    times = stair_times(ranked, stairs)

    def rate(choice: tuple[tuple[int, ...], ...]) -> float:
        tokens = sum(1 + sum(p[n] for n in s) for p, s in zip(contexts, choice, strict=True))
        return tokens / sum(cost_of(s, times) for s in choice)

    def rate_of(price: float) -> float:
        decided = limits.best_trees(ranked, times, price)
        easy, hard = (figures(ranked, times, decided, row) for row in range(2))
        return (easy[0] + hard[0]) / (easy[1] + hard[1])

    best = max(rate(choice) for choice in product(closed_subsets(), repeat=2))
    price, found = limits.settle(rate_of, 1e-3)
    assert found == pytest.approx(best, rel=1e-6)
    assert price == pytest.approx(best, rel=1e-3)


def test_what_is_accepted_is_what_is_inside() -> None:
    ranked = ranked_of([[1, 0.9, 0.2, 0.8, 0.1, 0.1, 0.7]])
    path = np.isin(ranked.prob, np.array([0.9, 0.8, 0.7], np.float32))
    ranked = replace(ranked, on_path=path)
    clock = linear_clock(draft_fixed_us=0.0, draft_token_us=0.0)
    accepted = [
        int(limits.best_trees(ranked, limits.tree_times(ranked, clock), price).accepted[0])
        for price in (0.001, 0.06, 0.075, 0.085, 0.095)
    ]
    assert accepted == [3, 3, 2, 1, 0]


def test_empty_slots_are_never_taken() -> None:
    ranked = ranked_of([[1, 0.9, 0.2, 0.8, 0.1, 0.1, 0.7]])
    wide = np.pad(ranked.prob, ((0, 0), (0, 3)))
    deep = np.pad(ranked.depth, ((0, 0), (0, 3)), constant_values=limits.NOT_THERE)
    padded = replace(ranked, prob=wide, depth=deep, on_path=np.zeros(deep.shape, bool))
    clock = linear_clock(verify_token_us=0.0)
    assert np.asarray(
        limits.best_trees(padded, limits.tree_times(padded, clock), 1e-9).verified
    ) == [7]
