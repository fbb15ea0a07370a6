"""Imported chains in batches: requests in file order, B at a time, each batch until it is empty.

A batch shrinks as its requests end, so a length that depends on the batch grows towards its end,
and each step's time is that of the requests that are left in it. All batches step together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Bools, Floats, Ints, Longs
from specctl.replay.cost.model import Steps
from specctl.replay.foreign.schedules import Schedule
from specctl.replay.foreign.traces import ImportedTraces, censored


class RoundClock(Protocol):
    """Wall time of every step, `[S]` us; `cost.model.CostModel` is one."""

    def round_us(self, steps: Steps) -> Floats: ...


@dataclass(frozen=True)
class BatchRun:
    """Totals of a simulated run.

    Attributes:
        num_tokens: emitted by rounds, so without the one that each prompt's reading gives.
        calls: target verifications, counted once a request. num_steps: batched forwards.
        verified_tokens: roots counted. num_drafted: draft tokens.
        histogram: rounds by accepted draft tokens, from 0 on.
        num_censored: rounds that a deeper log might have let accept more.
        time_us: of all steps, one batch after the other, prompts' reading excluded; None without
            a clock.
    """

    batch_size: int
    num_requests: int
    num_tokens: int
    calls: int
    num_steps: int
    verified_tokens: int
    num_drafted: int
    num_accepted: int
    histogram: tuple[int, ...]
    num_censored: int
    time_us: float | None

    @property
    def mean_acceptance_length(self) -> float:
        """τ = 1 + accepted draft tokens per call, pooled."""
        return 1 + self.num_accepted / self.calls

    @property
    def tokens_per_s(self) -> float | None:
        """Σ tokens / Σ time of the steps."""
        return None if self.time_us is None else 1e6 * self.num_tokens / self.time_us

    @property
    def censored_share(self) -> float:
        """Share of rounds that a deeper log might have let accept more."""
        return self.num_censored / self.calls


def simulate_batches(
    traces: ImportedTraces,
    drafter: str,
    schedule: Schedule,
    *,
    batch_size: int = 1,
    clock: RoundClock | None = None,
) -> BatchRun:
    """Replays a chain whose length may depend on the batch.

    Args:
        batch_size: requests that start together.
        clock: a cost model; it is called once, with every step.

    Raises:
        UsageError: a batch size below 1, or a drafter that was not imported.
    """
    if batch_size < 1:
        raise UsageError(
            "batch size", expected="at least 1", found=str(batch_size), fix="1 is no batch"
        )
    parts = list(_steps(traces, traces.accepted_by(drafter), schedule, batch_size))
    rows = _Rows(*(np.concatenate([getattr(p, n) for p in parts]) for n in _Rows.__slots__))
    accepted = np.minimum(rows.logged, rows.drafted)
    depth, remaining = traces.offered_depth(drafter), traces.positions.remaining[rows.row]
    is_censored = censored(rows.logged, remaining, depth) & schedule.looks_past(depth, rows.drafted)
    steps = _batch_steps(traces, rows, accepted)
    return BatchRun(
        batch_size=batch_size,
        num_requests=traces.positions.num_requests,
        num_tokens=int(traces.positions.remaining[traces.positions.start[:-1]].sum()),
        calls=len(rows.row),
        num_steps=len(np.asarray(steps.num_tokens)),
        verified_tokens=len(rows.row) + int(rows.drafted.sum()),
        num_drafted=int(rows.drafted.sum()),
        num_accepted=int(accepted.sum()),
        histogram=tuple(np.bincount(accepted).tolist()),
        num_censored=int(is_censored.sum()),
        time_us=None if clock is None else float(np.sum(clock.round_us(steps))),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rounds of one or more steps, `[n]` each: position, its batch and step, draft, log."""

    row: Longs
    batch: Longs
    step: Longs
    drafted: Longs
    logged: Ints


def _steps(
    traces: ImportedTraces, logged: Ints, schedule: Schedule, batch_size: int
) -> Iterator[_Rows]:
    """The k-th step of every batch, k = 0, 1, ..."""
    positions = traces.positions
    here, end = positions.start[:-1].copy(), positions.start[1:]
    batch = np.arange(len(here)) // batch_size
    step = 0
    while len(here):
        num_active = np.bincount(batch)[batch]
        drafted = schedule.draft_tokens(num_active, logged[here])
        yield _Rows(here, batch, np.full(len(here), step), drafted, logged[here])
        here = here + np.minimum(drafted, logged[here]) + 1
        inside: Bools = here < end
        here, end, batch = here[inside], end[inside], batch[inside]
        step += 1


def _batch_steps(traces: ImportedTraces, rows: _Rows, accepted: Ints) -> Steps:
    """What a cost model asks of every batched forward, rows of one (batch, step) together."""
    keys = rows.batch * (int(rows.step.max()) + 1) + rows.step
    order = np.argsort(keys, kind="stable")
    first = np.flatnonzero(np.diff(keys[order], prepend=-1))
    size = np.diff(np.append(first, len(order)))
    remaining = traces.positions.remaining[rows.row]
    ends = accepted + 1 >= remaining
    read = np.where(ends, 0, accepted + 1)  # the drafter reads on only where the text goes on
    context = np.add.reduceat(traces.positions.context_tokens[rows.row][order], first)
    return Steps(
        batch_size=size,
        num_tokens=np.add.reduceat(rows.drafted[order], first) + size,
        context_tokens=context / size - 1,  # the root is not cached yet
        levels=np.maximum.reduceat(rows.drafted[order], first),
        level_width=np.ones(len(first)),
        num_emitted=np.maximum.reduceat(read[order], first),
    )
