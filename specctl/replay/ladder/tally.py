"""What a rung does, added up by request: the one thing that all rungs have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions
from specctl.replay.ladder.clock import LoadClock
from specctl.replay.rounds import Rounds
from specctl.replay.walk import walk
from specctl.stats import sums_by

SUMS = ("calls", "tokens", "accepted", "verified", "levels", "time_us")
"""Columns of a tally. `time_us` is machine time, see `LoadClock`."""
ByRowT = TypeVar("ByRowT")


@dataclass(frozen=True)
class Decided:
    """What a rung would do at each of R positions; `[R]`, or one number for all.

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
    ones = np.ones(len(rows))
    columns = (ones, emitted, here.accepted, here.verified, here.levels, time_us)
    return _by_request(request_of(positions, rows), positions.num_requests, columns)


def tally_rounds(run: Rounds, clock: LoadClock) -> Tally:
    """The same of a replayed policy."""
    o = run.outcomes
    ones = np.ones(len(run.request))
    columns = (ones, run.emitted, o.accepted, o.verified, o.levels, clock(run))
    return _by_request(run.request, len(run.prompt), columns)


def _by_request(request: Longs, num_requests: int, columns: tuple[Any, ...]) -> Tally:
    values = np.stack([np.asarray(column, np.float64) for column in columns], 1)
    return Tally(sums_by(request, num_requests, values))


def request_of(positions: Positions, rows: Longs) -> Longs:
    """`[M]` int64, the request of each row."""
    return np.searchsorted(positions.start, rows, side="right") - 1


def take_requests(held: ByRowT, requests: Bools) -> ByRowT:
    """A dataclass of `positions` and arrays by row, for some requests only.

    Whoever holds the result cannot look at the others: what is tuned on one side of a split
    never sees the other.
    """
    positions: Positions = held.positions  # type: ignore[attr-defined]
    rows = rows_of(positions, requests)
    arrays = {
        field.name: value[rows]
        for field in fields(held)  # type: ignore[arg-type]
        if isinstance(value := getattr(held, field.name), np.ndarray)
    }
    kept = take_positions(positions, requests)
    return replace(held, positions=kept, **arrays)  # type: ignore[type-var]


def rows_of(positions: Positions, requests: Bools) -> Bools:
    """`[R]`: the row belongs to one of these requests."""
    return np.repeat(requests, np.diff(positions.start))


def take_positions(positions: Positions, requests: Bools) -> Positions:
    """The positions of some requests; names keep their codes."""
    rows, lengths = rows_of(positions, requests), np.diff(positions.start)[requests]
    return replace(
        positions,
        start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt=positions.prompt[requests],
        category=positions.category[requests],
        remaining=positions.remaining[rows],
        context_tokens=positions.context_tokens[rows],
    )
