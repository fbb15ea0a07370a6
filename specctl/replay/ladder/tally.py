"""Sums of a policy by request, and the machine time that every rung is charged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from specctl.logs.positions import Floats, Ints, Longs, Positions
from specctl.replay.cost.model import CostModel, Steps, steps_of
from specctl.replay.outcomes import Outcomes
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


class RunningSums:
    """Sums of one policy over requests that come some at a time, in their order.

    Attributes:
        sums: `[G, S]` of groups of requests.
    """

    def __init__(self, num_groups: int, num_columns: int) -> None:
        """Begins with no requests."""
        self.sums = np.zeros((num_groups, num_columns))
        self._counts: dict[str, int] = dict.fromkeys(("rounds", "wanted", "missing", "censored"), 0)

    def add(self, groups: Longs, sums: Floats, rounds: Outcomes) -> None:
        """Adds requests `[Q]`.

        Args:
            groups: `[Q]` the group of each. sums: `[Q, S]`. rounds: of them all.
        """
        np.add.at(self.sums, groups, sums)
        self._counts["rounds"] += len(rounds.accepted)
        for name in ("wanted", "missing", "censored"):
            self._counts[name] += int(getattr(rounds, name).sum())

    @property
    def support(self) -> float:
        """As `Outcomes.support`, of all rounds."""
        found = self._counts
        held = 1 - found["missing"] / max(1.0, found["wanted"])
        return min(held, 1 - found["censored"] / found["rounds"])


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

    def chain_us(self, num_draft_tokens: int, num_emitted: float, *, context_tokens: int) -> float:
        """us of machine time per request, of a round of a chain that emits so many tokens."""
        verified = num_draft_tokens + 1
        steps = Steps(1, verified, context_tokens, num_draft_tokens, 1, num_emitted, verified)
        return float(self.share_us(steps))

    def check(self) -> None:
        """Refuses a load that was not measured, before minutes of reading."""
        self.share_us(Steps(1, 2, 1, 1, 1, 1))


def tally(
    positions: Positions, outcomes: Outcomes, clock: LoadClock, *, level_width: int
) -> Floats:
    """Walks every request: a round starts where the one before it ended.

    Args:
        outcomes: `[R]` accepted, verified and levels at each position.
        level_width: nodes that each level below the first evaluates.

    Returns:
        `[Q, S]` sums of requests, the first `NUM_TALLIED` of `SUMS`.
    """
    rows = np.flatnonzero(walk(positions, outcomes.accepted + 1))
    here, remaining = outcomes.at(rows), positions.remaining[rows]
    emitted = np.minimum(here.accepted + 1, remaining)
    steps = Steps(
        batch_size=1,
        num_tokens=here.verified,
        context_tokens=positions.context_tokens[rows] - 1,
        levels=here.levels,
        level_width=level_width,
        num_emitted=np.where(emitted == remaining, 0, emitted),
    )
    request, num_requests = positions.request[rows], positions.num_requests
    return _sums(request, num_requests, emitted, here, clock.share_us(steps))


def tally_rounds(run: Rounds, clock: LoadClock) -> Floats:
    """The same of a replayed policy."""
    times = clock.share_us(steps_of(run))
    return _sums(run.request, run.positions.num_requests, run.emitted, run.outcomes, times)


def _sums(
    request: Longs, num_requests: int, emitted: Ints, outcomes: Outcomes, time_us: Floats
) -> Floats:
    counts = (emitted, outcomes.accepted, outcomes.verified, outcomes.levels)
    columns = np.column_stack([np.ones(len(request)), *counts, time_us])
    return sums_by(request, num_requests, columns)
