"""Walking requests: a round at a position decides where the next one stands.

All requests step together, so a walk costs as many array operations as the longest request has
rounds, not as many as there are rounds.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions


def walk(positions: Positions, advance: Ints | Longs) -> Bools:
    """The positions where rounds start.

    Args:
        advance: `[R]` tokens that a round starting there emits, at least 1; beyond the end of
            the response is the end.

    Returns:
        `[R]` bool.
    """
    visited = np.zeros(positions.num_rows, np.bool_)
    here, end = positions.start[:-1].copy(), positions.start[1:]
    while len(here):
        visited[here] = True
        here = here + advance[here]
        inside = here < end
        here, end = here[inside], end[inside]
    return visited


def _total_cost(
    better: np.ufunc, positions: Positions, cost: Floats, low: Ints, high: Ints
) -> Floats:
    """Least or most total cost from every position to the end of its request.

    The exact dynamic programme F(t) = cost(t) + min over low(t) <= a <= high(t) of F(t + a), or
    max, in which each round may emit any number of tokens within its bounds. It goes backwards
    over all requests at once, the k-th position from every end together.

    Args:
        better: `np.minimum` or `np.maximum`. cost: `[R]` of a round that starts there.
        low, high: `[R]` tokens emitted, 1 <= low <= high.

    Returns:
        `[R]` float64.
    """
    total = np.zeros(positions.num_rows + 1)
    last = positions.start[1:] - 1
    lengths = np.diff(positions.start)
    for back in range(int(lengths.max(initial=0))):
        longer = lengths > back
        here, end = (last - back)[longer], (last + 1)[longer]
        best = cost_after(total, here + low[here], end)
        for step in range(1, int((high[here] - low[here]).max(initial=0)) + 1):
            reach = np.minimum(low[here] + step, high[here])
            best = better(best, cost_after(total, here + reach, end))
        total[here] = cost[here] + best
    return total[:-1]


fewest, most = partial(_total_cost, np.minimum), partial(_total_cost, np.maximum)
"""From positions, costs and bounds to `[R]` totals; see `_total_cost`."""


def cost_after(total: Floats, row: Longs, end: Longs) -> Floats:
    """Cost from a row on; nothing beyond the end of its request."""
    return np.where(row < end, total[np.minimum(row, end - 1)], 0.0)
