"""The clairvoyant and the ceiling: what no policy over this log can beat.

The clairvoyant knows the path that the text will take. At a position where the logged tree holds
L tokens of it, it drafts k <= L of them, no wider than that one path, and verifies k + 1 nodes:

    F(t) = min over 0 <= k <= L(t) of  T_draft(k) + T_verify(k + 1) + F(t + k + 1)

(notes/state-of-the-art.md, section 2.3). A policy that accepts a <= L(t) tokens there drafted a
levels or more and verified a + 1 nodes or more, so it pays no less: F bounds every lossless policy
on every single request, wherever time does not fall as levels, widths or tokens grow. The ceiling
is the same programme with L = D everywhere: a drafter that is always right.
"""

from __future__ import annotations

import numpy as np

from specctl.logs.positions import Floats, Ints, Positions
from specctl.replay.ladder.clock import LoadClock
from specctl.replay.ladder.tally import Decided


def clairvoyant(positions: Positions, reach: Ints, clock: LoadClock) -> Decided:
    """The least time to emit every text, given how far each position's tree follows it.

    Args:
        reach: `[R]` draft tokens that a round may accept, L(t).
    """
    limit = np.minimum(reach, positions.remaining - 1)  # the bonus token emits the last one
    _, taken = cheapest(positions, round_costs(positions, limit, clock), limit)
    return Decided(taken, taken + 1, taken, 1)


def round_costs(positions: Positions, limit: Ints, clock: LoadClock) -> Floats:
    """`[R, K + 1]` us of a round that drafts a path of k tokens and accepts them all."""
    taken = np.arange(int(limit.max(initial=0)) + 1)
    is_last = taken + 1 >= positions.remaining[:, None]
    return clock.share_us(
        context_tokens=positions.context_tokens[:, None],
        num_tokens=taken + 1,
        levels=taken,
        level_width=1,
        num_emitted=np.where(is_last, 0, taken + 1),
    )


def cheapest(positions: Positions, cost: Floats, limit: Ints) -> tuple[Floats, Ints]:
    """The dynamic programme, backwards over all requests at once.

    Args:
        cost: `[R, K + 1]` of a round that accepts k tokens. limit: `[R]`, the most it may accept.

    Returns:
        `[R]` float64 least cost from each position on, and `[R]` int32 how many to accept there:
        the fewest of equals.
    """
    total, taken = np.zeros(positions.num_rows), np.zeros(positions.num_rows, np.int32)
    lengths, last = np.diff(positions.start), positions.start[1:] - 1
    for back in range(int(lengths.max(initial=0))):
        longer = lengths > back
        here, end = (last - back)[longer], (last + 1)[longer]
        best = np.full(len(here), np.inf)
        for k in range(int(limit[here].max()) + 1):
            there = here + k + 1
            after = np.where(there < end, total[np.minimum(there, end - 1)], 0.0)
            found = np.where(k <= limit[here], cost[here, k] + after, np.inf)
            taken[here[found < best]] = k
            best = np.minimum(best, found)
        total[here] = best
    return total, taken
