"""Sums of a rung by request, and the machine time that every rung is charged."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions
from specctl.replay.cost.model import CostModel, Steps, steps_of
from specctl.replay.rounds import Rounds
from specctl.replay.walk import walk
from specctl.stats import sums_by

SUMS = ("calls", "tokens", "accepted", "verified", "levels", "time_us")
"""Columns of a tally. `time_us` is machine time, see `LoadClock`."""
ByRowT = TypeVar("ByRowT")


@dataclass(frozen=True)
class LoadClock:
    """A request's share of a batch of `batch_size` requests that run rounds of one kind.

    At batch size 1 this is the round's own time. Above, the batch is taken to be B copies of the
    round at hand, and each copy pays one B-th: exact where time is linear in the tokens, and a
    mean-field statement elsewhere, because a real batch waits for its deepest draft
    (`replay.batch` simulates that).
    """

    model: CostModel
    batch_size: int = 1

    def share_us(
        self,
        *,
        context_tokens: ArrayLike,
        num_tokens: ArrayLike,
        levels: ArrayLike,
        level_width: ArrayLike,
        num_emitted: ArrayLike,
    ) -> Floats:
        """us of machine time per request, of the arguments' common shape.

        Args:
            context_tokens: text up to and with the root. num_tokens: nodes verified, root
                counted. levels: drafted. level_width: nodes that each level below the first
                evaluates. num_emitted: tokens emitted; 0 where the request ends, so that the
                drafter reads nothing more.
        """
        cached, tokens = np.asarray(context_tokens) - 1, np.asarray(num_tokens)
        return self._share(Steps(1, tokens, cached, levels, level_width, num_emitted))

    def __call__(self, run: Rounds) -> Floats:
        """`[M]`: the same of replayed rounds."""
        return self._share(steps_of(run))

    def check(self) -> None:
        """Refuses before minutes of reading what would be refused after them."""
        self.share_us(context_tokens=2, num_tokens=2, levels=1, level_width=1, num_emitted=1)

    def _share(self, steps: Steps) -> Floats:
        tokens = np.asarray(steps.num_tokens) * self.batch_size
        batch = replace(steps, batch_size=self.batch_size, num_tokens=tokens)
        return self.model.round_us(batch) / self.batch_size


@dataclass(frozen=True)
class Decided:
    """The rounds of a rung at each of R positions; `[R]`, or one number for all.

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
        return Decided(*(column[rows] for column in picked))


@dataclass(frozen=True)
class Tally:
    """Sums of Q requests: `[Q, S]` float64, columns `SUMS`."""

    sums: Floats

    def total(self, name: str) -> float:
        """One column over all requests."""
        return float(self.sums[:, SUMS.index(name)].sum())

    @property
    def tokens_per_us(self) -> float:
        """The long-run rate, Σ tokens / Σ time."""
        return self.total("tokens") / self.total("time_us")

    def of(self, requests: Bools) -> Tally:
        """Some requests."""
        return Tally(self.sums[requests])


def tally(positions: Positions, decided: Decided, clock: LoadClock) -> Tally:
    """Walks every request: a round starts where the one before it ended."""
    rows = np.flatnonzero(walk(positions, decided.accepted + 1))
    here, remaining = decided.at(rows), positions.remaining[rows]
    emitted = np.minimum(here.accepted + 1, remaining)
    time_us = clock.share_us(
        context_tokens=positions.context_tokens[rows],
        num_tokens=here.verified,
        levels=here.levels,
        level_width=here.level_width,
        num_emitted=np.where(emitted == remaining, 0, emitted),
    )
    columns = (np.ones(len(rows)), emitted, here.accepted, here.verified, here.levels, time_us)
    return _by_request(positions.request[rows], positions.num_requests, columns)


def tally_rounds(run: Rounds, clock: LoadClock) -> Tally:
    """The same of a replayed policy."""
    o, ones = run.outcomes, np.ones(len(run.request))
    columns = (ones, run.emitted, o.accepted, o.verified, o.levels, clock(run))
    return _by_request(run.request, run.positions.num_requests, columns)


def _by_request(request: Longs, num_requests: int, columns: tuple[Any, ...]) -> Tally:
    values = np.stack([np.asarray(column, np.float64) for column in columns], 1)
    return Tally(sums_by(request, num_requests, values))


def take_requests(held: ByRowT, requests: Bools) -> ByRowT:
    """A dataclass of `positions` and arrays by row, for some requests `[Q]` only.

    Code that holds the result cannot look at the others: tuning on one side of a split never sees
    the other.
    """
    positions: Positions = held.positions  # type: ignore[attr-defined]
    rows = positions.rows_of(requests)
    arrays = {
        field.name: value[rows]
        for field in fields(held)  # type: ignore[arg-type]
        if isinstance(value := getattr(held, field.name), np.ndarray)
    }
    return replace(held, positions=positions.take(requests), **arrays)  # type: ignore[type-var]
