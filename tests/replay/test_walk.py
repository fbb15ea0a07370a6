"""Walks and bounds against recursion."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specctl.logs.positions import join_positions
from specctl.replay.walk import fewest, most, walk
from tests.replay.positions import LENGTHS, check_positions, positions_of


@given(LENGTHS, st.randoms(use_true_random=False))
def test_a_walk_visits_what_stepping_visits(lengths: list[int], random: object) -> None:
    positions = positions_of(lengths)
    advance = np.array([random.randint(1, 5) for _ in range(sum(lengths))], np.int32)
    wanted, row = np.zeros(sum(lengths), bool), 0
    for length in lengths:
        here = row
        while here < row + length:
            wanted[here] = True
            here += advance[here]
        row += length
    assert walk(positions, advance).tolist() == wanted.tolist()


@given(LENGTHS, st.randoms(use_true_random=False))
def test_bounds_are_the_extremes_over_all_walks(lengths: list[int], random: object) -> None:
    positions, rows = positions_of(lengths), sum(lengths)
    low = np.array([random.randint(1, 3) for _ in range(rows)], np.int32)
    high = low + np.array([random.randint(0, 3) for _ in range(rows)], np.int32)
    cost = np.array([random.randint(0, 9) for _ in range(rows)], float)
    ends = np.repeat(positions.start[1:], np.diff(positions.start))

    @cache
    def best(row: int, pick: str) -> float:
        steps = range(low[row], high[row] + 1)
        after = [best(row + s, pick) if row + s < ends[row] else 0.0 for s in steps]
        return cost[row] + (min(after) if pick == "min" else max(after))

    assert fewest(positions, cost, low, high).tolist() == [best(r, "min") for r in range(rows)]
    assert most(positions, cost, low, high).tolist() == [best(r, "max") for r in range(rows)]


def test_parts_are_joined_under_one_table_of_names() -> None:
    joined = join_positions([positions_of([2, 3]), positions_of([1], prompt=1)])
    check_positions(joined)
    assert joined.start.tolist() == [0, 2, 5, 6]
    assert joined.prompt_ids == ("p0", "p1")
    assert joined.prompt.tolist() == [0, 1, 1]
    assert joined.request.tolist() == [0, 0, 1, 1, 1, 2]
