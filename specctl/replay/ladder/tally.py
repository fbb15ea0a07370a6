"""Sums of a policy by request, and the machine time that every rung is charged."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from specctl.logs.positions import Floats, Ints, Longs, Positions
from specctl.replay.cost.model import CostModel, Steps, steps_of
from specctl.replay.rounds import Rounds
from specctl.replay.walk import walk
from specctl.stats import sums_by

SUMS = (
    *("calls", "tokens", "accepted", "verified", "levels", "time_us"),
    *("request_us", "wall_us", "good_tokens"),
)
"""Sums of a request or a prompt. `time_us` is its share of the machine's time, see `LoadClock`; of
a simulated step, the step's time divided by the requests in it. A tally ends here. `request_us` is
what the requests waited for their tokens after the first. `wall_us` is a share of the run's
duration, which differs from `time_us` where the machine idles between arrivals. `good_tokens` are
those of requests whose time per output token is within the limit."""
NUM_TALLIED = SUMS.index("time_us") + 1


def column(sums: Floats, name: str) -> Floats:
    """One of `SUMS`, `[...]` of `[..., S]`."""
    return sums[..., SUMS.index(name)]


def tokens_per_us(sums: Floats) -> Floats:
    """The long-run rate, Σ tokens / Σ time, `[...]` of sums `[..., S]`."""
    return column(sums, "tokens") / column(sums, "time_us")


@dataclass(frozen=True)
class LoadClock:
    """A request's share of a batch of `batch_size` requests that run rounds of one kind.

    At batch size 1 this is the round's own time. Above, the batch is taken to be B copies of the
    round at hand, and each copy pays one B-th: exact where time is linear in the tokens, and a
    mean-field statement elsewhere, because a real batch waits for its deepest draft
    (`replay.batch_simulation` simulates that).
    """

    model: CostModel
    batch_size: int = 1

    def share_us(self, steps: Steps) -> Floats:
        """us of machine time per request, of rounds of one request each."""
        tokens = np.asarray(steps.num_tokens) * self.batch_size
        batch = replace(steps, batch_size=self.batch_size, num_tokens=tokens)
        return self.model.round_us(batch) / self.batch_size

    def check(self) -> None:
        """Refuses a load that was not measured, before minutes of reading."""
        self.share_us(Steps(1, 2, 1, 1, 1, 1))


@dataclass(frozen=True)
class Decided:
    """The rounds of a policy at each of R positions; `[R]`, or one number for all.

    Attributes:
        accepted: draft tokens. verified: nodes, root counted. levels: drafted. level_width:
            nodes that each level below the first evaluates.
    """

    accepted: Ints
    verified: ArrayLike
    levels: ArrayLike
    level_width: ArrayLike

    def at(self, rows: Longs) -> Decided:
        """Some rows."""
        picked = [np.broadcast_to(getattr(self, f.name), self.accepted.shape) for f in fields(self)]
        return Decided(*(values[rows] for values in picked))


def tally(positions: Positions, decided: Decided, clock: LoadClock) -> Floats:
    """Walks every request: a round starts where the one before it ended.

    Returns:
        `[Q, S]` sums of requests, the first `NUM_TALLIED` of `SUMS`.
    """
    rows = np.flatnonzero(walk(positions, decided.accepted + 1))
    here, remaining = decided.at(rows), positions.remaining[rows]
    emitted = np.minimum(here.accepted + 1, remaining)
    steps = Steps(
        batch_size=1,
        num_tokens=here.verified,
        context_tokens=positions.context_tokens[rows] - 1,
        levels=here.levels,
        level_width=here.level_width,
        num_emitted=np.where(emitted == remaining, 0, emitted),
    )
    counts = (emitted, here.accepted, here.verified, here.levels)
    columns = (np.ones(len(rows)), *counts, clock.share_us(steps))
    return sums_by(positions.request[rows], positions.num_requests, np.column_stack(columns))


def tally_rounds(run: Rounds, clock: LoadClock) -> Floats:
    """The same of a replayed policy."""
    o, ones = run.outcomes, np.ones(len(run.request))
    times = clock.share_us(steps_of(run))
    columns = (ones, run.emitted, o.accepted, o.verified, o.levels, times)
    return sums_by(run.request, run.positions.num_requests, np.column_stack(columns))
