"""From rounds to sums a prompt, ratios of sums, and figures with intervals.

    Rounds ─by_prompt─► Sums ─drawn─► sums of resamples ─RATIOS─► Interval

Chunks become sums at once, so a log of any size leaves one row a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Bools, Floats, Longs, Positions
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import Policy
from specctl.progress import advance
from specctl.replay.cost.model import CostModel, Steps, steps_of
from specctl.replay.facts import MARKED_BELOW
from specctl.replay.outcomes import Outcomes, check_replayable, map_policies
from specctl.replay.rounds import Clock, Rounds, replay_chunk, walk_outcomes
from specctl.replay.static import static_submissions
from specctl.stats import Interval, Resamples, sums_by, with_time_error

Columns = dict[str, Floats]
"""By name, `[Q]` of requests or `[P]` of prompts."""
Totals = dict[str, Any]
"""Sums by name, `[...]` each."""

# --------------------------------------------------------------------------- ratios


PERCENTILES = (50, 90, 99)
RATIOS: dict[str, Callable[[Totals], Any]] = {
    "mean_acceptance_length": lambda s: 1 + s["accepted"] / s["calls"],
    "calls_per_token": lambda s: s["calls"] / s["tokens"],
    "verified_per_token": lambda s: s["verified"] / s["tokens"],
    "verified_per_call": lambda s: s["verified"] / s["calls"],
    "levels_per_call": lambda s: s["levels"] / s["calls"],
    "draft_utilisation": lambda s: s["accepted"] / (s["verified"] - s["calls"]),
    "tokens_per_s": lambda s: 1e6 * s["tokens"] / s["time_us"],
    "tpot_us": lambda s: s["request_us"] / s["decoded"],
    # under a load
    "request_tokens_per_s": lambda s: 1e6 * s["decoded"] / s["request_us"],
    "good_tokens_per_s": lambda s: 1e6 * s["good_tokens"] / s["wall_us"],
    "good_share": lambda s: s["good_tokens"] / s["decoded"],
    "verified_per_step": lambda s: s["verified"] / s["steps"],
    "padding_share": lambda s: 1 - s["verified"] / s["processed"],
    "requests_per_step": lambda s: s["calls"] / s["steps"],
    "occupancy": lambda s: s["busy_us"] / s["slot_us"],
    "ttft_us": lambda s: s["wait_us"] / s["requests"],
    "goodput_share": lambda s: s["good"] / s["requests"],
    "goodput_tokens_per_s": lambda s: (
        1e6 * s["tokens"] / s["time_us"] * s["good_tokens"] / s["request_tokens"]
    ),
}
"""Ratios of sums, by the name of the figure.

`draft_utilisation` is accepted over submitted draft tokens; `tpot_us` the time per output token
after the first, of whole requests; `padding_share` of the target's forward; `occupancy` the share
of slot time that requests hold, the reading of prompts included."""


def ratio(name: str, totals: Totals) -> Floats:
    """A figure of sums; NaN if undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(RATIOS[name](totals), np.float64)


# --------------------------------------------------------------------------- sums


@dataclass(frozen=True)
class Sums:
    """Sums of one policy, one row a prompt; under a load, a prompt of a run."""

    rows: tuple[str, ...]  # ids of the prompts
    groups: tuple[str, ...]  # category of each, empty for none
    names: tuple[str, ...]  # of the columns, see docs/architecture.md
    table: Floats  # `[P, S]`

    @classmethod
    def of(cls, rows: Sequence[str], groups: Sequence[str], columns: Columns) -> Sums:
        return cls(tuple(rows), tuple(groups), tuple(columns), np.column_stack([*columns.values()]))

    @property
    def columns(self) -> Columns:
        """`[P]` by name."""
        return dict(zip(self.names, self.table.T, strict=True))

    @cached_property
    def totals(self) -> Totals:
        """Over all rows."""
        return {name: float(column.sum()) for name, column in self.columns.items()}

    @property
    def support(self) -> float:
        """The share of the wanted expansions or of the rounds, the lesser, that the log holds."""
        total = self.totals
        return min(expansion_support(total), 1 - float(total["censored"] / total["calls"]))

    @property
    def is_supported(self) -> bool:
        """Whether the log supports figures of the policy."""
        return self.support >= MARKED_BELOW

    def take(self, chosen: Bools | Longs) -> Sums:
        """Some rows, by index or mask; -1 is a row of zeros."""
        index = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        rows, groups = ([of[i] for i in index.tolist()] for of in (self.rows, self.groups))
        table = np.where(index[:, None] < 0, 0.0, self.table[index])
        return Sums(tuple(rows), tuple(groups), self.names, table)

    def select(self, prompts: Sequence[str]) -> Sums:
        """The rows of some prompts, in their order; zeros for a prompt without rounds."""
        place = {name: index for index, name in enumerate(self.rows)}
        found = self.take(np.array([place.get(name, -1) for name in prompts], np.int64))
        return replace(found, rows=tuple(prompts))


def expansion_support(totals: Totals) -> float:
    """The share of the wanted expansions that the log holds."""
    return 1 - float(totals["missing"] / max(1.0, totals["wanted"]))


def request_sums(run: Rounds, clock: Clock | None = None) -> Columns:
    """`[Q]` sums of every request: rounds, tokens, outcomes and time, NaN without a clock."""
    of_round = {field.name: getattr(run.outcomes, field.name) for field in fields(Outcomes)}
    ones = np.ones(len(run.request))
    time_us = np.full(len(ones), np.nan) if clock is None else clock(run)
    of_round = {"calls": ones, "tokens": run.emitted, **of_round, "time_us": time_us}
    table = sums_by(run.request, run.positions.num_requests, [*of_round.values()])
    return dict(zip(of_round, table.T, strict=True))


def by_prompt(positions: Positions, columns: Columns, requests: Longs | None = None) -> Sums:
    """A row for every prompt that has requests.

    Args:
        columns: `[M]` sums of requests. requests: `[M]` their numbers in `positions`; None for all,
            in order.
    """
    logged = np.arange(positions.num_requests) if requests is None else requests
    codes, first, place = np.unique(
        positions.prompt[logged], return_index=True, return_inverse=True
    )
    category = positions.category[logged[first]]
    return Sums(
        tuple(positions.prompt_ids[code] for code in codes.tolist()),
        tuple(positions.categories[code] for code in category.tolist()),
        tuple(columns),
        sums_by(place, len(codes), [*columns.values()]),
    )


def join_sums(parts: Iterable[Sums]) -> Sums:
    """The sums of parts of a log, prompts in order of appearance; missing columns are 0."""
    parts = list(parts)
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    groups: dict[str, str] = {}
    for part in parts:
        groups = dict(zip(part.rows, part.groups, strict=True)) | groups
    rows = tuple(dict.fromkeys(row for part in parts for row in part.rows))
    place = {row: index for index, row in enumerate(rows)}
    table = np.zeros((len(rows), len(names)))
    for part in parts:
        at = np.array([place[row] for row in part.rows], np.int64)
        column = np.array([names.index(name) for name in part.names], np.int64)
        table[np.ix_(at, column)] += part.table
    return Sums(rows, tuple(groups[row] for row in rows), names, table)


def replayed_sums(
    log: DenseLog,
    policies: Sequence[Policy],
    clock: Clock | None,
    complete: Callable[[Columns], Columns] = lambda columns: columns,
) -> list[Sums]:
    """Sums of every policy by prompt, in the order of the log; `settings` progress.

    Args:
        complete: adds columns to those of requests, `[Q]`.
    """

    def summed(run: Rounds) -> Sums:
        return by_prompt(run.positions, complete(request_sums(run, clock)))

    def replayed(policy: Policy, chunk: LogChunk) -> Sums:
        return summed(replay_chunk(policy, chunk, with_bounds=False))

    found: dict[int, Sums] = {}
    for index, of in static_submissions(log, policies):
        rounds = walk_outcomes(of.policy, of.positions, of.outcomes, of.max_tokens)
        found[index] = summed(rounds)
        advance("settings")
    others = {index: one for index, one in enumerate(policies) if index not in found}
    for policy in others.values():
        check_replayable(policy)
    parts = map_policies(log, list(others.values()), replayed) if others else ()
    for index, of_policy in zip(others, zip(*parts, strict=True), strict=True):
        found[index] = join_sums(of_policy)
        advance("settings")
    return [found[index] for index in range(len(policies))]


# --------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Measure:
    """Figures over the same resamples of rows, so that all comparisons are paired."""

    resamples: Resamples
    time_error: float | None = None  # of the clock, see `stats.with_time_error`
    seed: int = 0  # of its draws

    def drawn(self, sums: Sums, policy: str) -> Totals:
        """`[1 + B]` totals by name, of all rows and of every resample, with the clock's error.

        Args:
            policy: seeds the error of the clock, which is the same for equal policies.
        """
        times = [place for place, name in enumerate(sums.names) if name.endswith("_us")]
        table = self.resamples.drawn(sums.table)
        table = with_time_error(table, times, self.time_error, policy, self.seed)
        return dict(zip(sums.names, table.T, strict=True))

    def figures(self, names: Iterable[str], drawn: Totals) -> dict[str, Interval]:
        return {name: self.resamples.read(ratio(name, drawn)) for name in names}

    def against(self, ours: Floats, theirs: Floats) -> Interval:
        """One figure over another."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.resamples.read(ours / theirs)


# --------------------------------------------------------------------------- the clock


@dataclass(frozen=True)
class LoadClock:
    """A request's share of a batch of `batch_size` requests that run rounds of one kind.

    A batch is B copies of the round, and each pays one B-th. This is exact for times linear in the
    tokens, else a mean-field approximation: a real batch waits for its deepest draft, which
    `replay.batch_simulation` simulates.
    """

    model: CostModel
    batch_size: int = 1

    @classmethod
    def known(cls, model: CostModel, batch_sizes: Sequence[int]) -> list[int]:
        """The loads that the cost model knows, the first among them.

        Raises:
            UsageError: it does not know the first.
        """
        known: list[int] = []
        for size in batch_sizes:
            try:
                cls(model, size).check()
            except UsageError:
                if not known:
                    raise
            else:
                known.append(size)
        return known

    def __call__(self, run: Rounds) -> Floats:
        """`[M]` us of machine time of every round."""
        return self.share_us(steps_of(run))

    def share_us(self, steps: Steps) -> Floats:
        """us of machine time per request, for rounds of one request each."""
        tokens = np.asarray(steps.num_tokens) * self.batch_size
        batch = replace(steps, batch_size=self.batch_size, num_tokens=tokens)
        return self.model.round_us(batch) / self.batch_size

    def chain_us(
        self, num_draft_tokens: int, num_emitted: float, *, context_tokens: float
    ) -> float:
        """us of machine time per request, for a round of a chain."""
        verified = num_draft_tokens + 1
        steps = Steps(1, verified, context_tokens, num_draft_tokens, 1, num_emitted, verified)
        return float(self.share_us(steps))

    def check(self) -> None:
        """Raises early if the cost model does not know the load."""
        self.share_us(Steps(1, 2, 1, 1, 1, 1))
