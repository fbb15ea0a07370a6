"""Figures of a replayed policy: pooled and by category, with intervals and support."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.logs.positions import Bools, Floats, Ints, Longs
from specctl.policy import Policy, policy_digest
from specctl.replay.facts import MARKED_BELOW, ResultRecord
from specctl.replay.rounds import Clock, Rounds
from specctl.stats import (
    Interval,
    Number,
    Resamples,
    add_by,
    figure_of,
    lengthened,
    sums_by,
    with_time_error,
)

RATIOS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mean_acceptance_length": lambda s: 1 + s["accepted"] / s["calls"],
    "calls_per_token": lambda s: s["calls"] / s["tokens"],
    "verified_per_token": lambda s: s["verified"] / s["tokens"],
    "levels_per_call": lambda s: s["levels"] / s["calls"],
    "draft_utilisation": lambda s: s["accepted"] / (s["verified"] - s["calls"]),
    "mean_tcr": lambda s: s["tcr"] / s["num_tcr"],
    "tokens_per_s": lambda s: 1e6 * s["tokens"] / s["time_us"],
    "tpot_us": lambda s: s["time_us"] / s["tokens"],
}
"""Ratios of sums. `draft_utilisation` is accepted over submitted draft tokens; `tpot_us` the time
per output token; both times are the cost model's, rounds only."""
COLUMNS = (
    *("calls", "tokens", "accepted", "verified", "levels", "wanted", "missing", "censored"),
    *("tcr", "time_us", "num_tcr"),
)
"""What every round adds to."""
TIMES = [COLUMNS.index("time_us")]
COMPARED = ("calls", "verified", "time_us")
"""Sums whose ratio to the baseline's is reported, paired by prompt."""


class Bound(ResultRecord):
    """Least and most that a figure can be, whatever the log lacks."""

    low: Number
    high: Number


class PolicyFigures(ResultRecord):
    """Figures of one policy on one group of requests.

    Attributes:
        policy: its label. group: `all` or a category.
        num_tokens: emitted by rounds, so without the one that each prompt's reading gives.
        histogram: rounds by accepted draft tokens, from 0 on.
        tcr_quantiles: of rounds with an accepted token: quantile to rank.
        expansion_support: share of the wanted expansions that the log contains.
        censored_share: share of rounds whose accepted path reaches what the log lacks.
        is_marked: the log supports less than 99% of what the policy needs.
        ratios: see `replay.score.RATIOS`; times are absent without a cost model.
        bounds: of calls, verified tokens and tau.
        against: ratios to the baseline's calls, verified tokens and time, paired by prompt.
    """

    policy: str
    group: str
    num_prompts: int
    num_requests: int
    num_tokens: int
    calls: int
    verified_tokens: int
    num_accepted: int
    drafted_levels: int
    time_us: float | None
    histogram: tuple[int, ...]
    tcr_quantiles: dict[str, int]
    expansion_support: float
    censored_share: float
    is_marked: bool
    ratios: dict[str, Interval]
    bounds: dict[str, Bound]
    against: dict[str, Interval]

    @property
    def tau(self) -> Interval:
        """Mean acceptance length, tokens per call."""
        return self.ratios["mean_acceptance_length"]

    @property
    def tokens_per_s(self) -> Interval | None:
        """None without a cost model."""
        return self.ratios.get("tokens_per_s")


class PolicyScores(ResultRecord):
    """One policy: all requests pooled, and each category."""

    policy: str
    pooled: PolicyFigures
    by_category: tuple[PolicyFigures, ...]


def score(
    labels: Sequence[str],
    runs: Sequence[Rounds],
    *,
    clock: Clock | None = None,
    baseline: int = 0,
    seed: int = 0,
) -> list[PolicyScores]:
    """Scores replayed policies side by side, from all their rounds; see `Scoring`.

    Args:
        runs: of one log, so that prompts agree.
        clock: the cost model's; without it no figure has a time.
    """
    scoring = Scoring(labels, clock)
    scoring.add(runs)
    return scoring.scores(baseline=baseline, seed=seed)


@dataclass
class _Sums:
    """Sums of one policy over K categories and C cells; a cell is a prompt within a category.

    Attributes:
        by_cell: `[C, S]`, columns `COLUMNS`. bounds: `[K, 4]`, as the fields of `RequestBounds`.
        lengths, ranks: rounds by category and accepted tokens, or terminal rank where it counts.
    """

    by_cell: Floats = field(default_factory=lambda: np.zeros((0, len(COLUMNS))))
    bounds: Floats = field(default_factory=lambda: np.zeros((0, 4)))
    lengths: Counter[tuple[int, int]] = field(default_factory=Counter)
    ranks: Counter[tuple[int, int]] = field(default_factory=Counter)


class Scoring:
    """Scores of policies side by side, of rounds that come some requests at a time.

    What is kept of a policy is sums by prompt, 96 bytes each, and counts by category. Rounds are
    added in their order, one after another, so that figures do not depend on how they were grouped.
    """

    def __init__(
        self, labels: Sequence[str], clock: Clock | None = None, time_error: float | None = None
    ) -> None:
        """Begins with no rounds; without a clock no figure has a time.

        Args:
            time_error: of the clock, see `stats.with_time_error`.
        """
        self.labels, self._clock, self._time_error = labels, clock, time_error
        self._policies: list[Policy] = []
        self._requests = Counter[int]()  # by category
        self._sums = [_Sums() for _ in labels]
        self._prompts: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._cells: dict[tuple[int, int], int] = {}

    def add(self, runs: Sequence[Rounds]) -> None:
        """Adds rounds of further requests, the same of every policy."""
        self._policies, positions = [run.policy for run in runs], runs[0].positions
        names = (positions.prompt_ids, self._prompts), (positions.categories, self._categories)
        prompt, category = (
            np.array([codes.setdefault(name, len(codes)) for name in found])[of]
            for (found, codes), of in zip(
                names, (positions.prompt, positions.category), strict=True
            )
        )
        pairs = zip(prompt.tolist(), category.tolist(), strict=True)
        cells = np.array([self._cells.setdefault(pair, len(self._cells)) for pair in pairs])
        self._requests.update(category.tolist())
        for run, sums in zip(runs, self._sums, strict=True):
            sums.by_cell = lengthened(sums.by_cell, len(self._cells))
            add_by(sums.by_cell, cells[run.request], [*self._columns(run).values()])
            of_round, is_whole = category[run.request], _has_terminal_rank(run)
            sums.lengths.update(_counted(of_round, run.outcomes.accepted))
            sums.ranks.update(_counted(of_round[is_whole], run.outcomes.tcr[is_whole]))
            assert run.bounds is not None, "scored runs have bounds"
            sums.bounds = lengthened(sums.bounds, len(self._categories))
            np.add.at(sums.bounds, category, np.stack([*vars(run.bounds).values()], 1))

    def _columns(self, run: Rounds) -> dict[str, NDArray[Any]]:
        """The amounts that every round adds to each sum, `[M]`, by `COLUMNS`."""
        columns, is_whole = run.counts(self._clock), _has_terminal_rank(run)
        columns |= {"tcr": np.where(is_whole, columns["tcr"], 0), "num_tcr": is_whole}
        return {name: columns[name] for name in COLUMNS}

    def scores(self, *, baseline: int = 0, seed: int = 0) -> list[PolicyScores]:
        """Figures of what was added.

        Args:
            baseline: index of the policy that the others are compared with.
            seed: of the resamples.
        """
        of_cell = np.array(list(self._cells), np.int64).reshape(-1, 2)
        found: list[list[PolicyFigures]] = []
        for group, categories in self._groups():
            inside = np.isin(of_cell[:, 1], categories)
            prompts, codes = np.unique(of_cell[inside, 0], return_inverse=True)
            resamples = Resamples.draw(len(prompts), seed=seed)  # the same for every policy
            tables = [
                sums_by(codes, len(prompts), sums.by_cell[: len(inside)][inside])
                for sums in self._sums
            ]
            drawn = [
                with_time_error(sums, TIMES, self._time_error, policy_digest(policy), seed)
                for sums, policy in zip(map(resamples.drawn, tables), self._policies, strict=True)
            ]
            found.append(
                [
                    _figures(
                        label,
                        policy,
                        sums,
                        ours,
                        drawn[baseline],
                        group=group,
                        categories=categories,
                        num_prompts=len(prompts),
                        num_requests=sum(self._requests[one] for one in categories),
                        resamples=resamples,
                    )
                    for label, policy, sums, ours in zip(
                        self.labels, self._policies, self._sums, drawn, strict=True
                    )
                ]
            )
        return [
            PolicyScores(policy=label, pooled=pooled, by_category=tuple(categories))
            for label, (pooled, *categories) in zip(
                self.labels, zip(*found, strict=True), strict=True
            )
        ]

    def _groups(self) -> Iterator[tuple[str, list[int]]]:
        """All categories, then each with a name and scored prompts."""
        yield "all", list(self._categories.values())
        scored = {category for _, category in self._cells}  # a log names those left out too
        for name, code in sorted(self._categories.items()):
            if name and code in scored:
                yield name, [code]


def _counted(category: Longs, values: Ints) -> dict[tuple[int, int], int]:
    """How often each value stands in each category."""
    pairs, counts = np.unique(category << 32 | values, return_counts=True)
    found = zip((pairs >> 32).tolist(), (pairs & 0xFFFFFFFF).tolist(), strict=True)
    return dict(zip(found, counts.tolist(), strict=True))


def _of_categories(found: Counter[tuple[int, int]], categories: list[int]) -> Longs:
    """Counts by value, from 0 to the largest."""
    counts = Counter[int]()
    for (category, value), count in found.items():
        if category in categories:
            counts[value] += count
    return np.array([counts[value] for value in range(max(counts, default=-1) + 1)], np.int64)


def _has_terminal_rank(run: Rounds) -> Bools:
    """`[M]` bool: something was accepted, and the text did not end on the path above its end."""
    accepted = run.outcomes.accepted
    is_cut = (run.emitted <= accepted) & (accepted < run.outcomes.levels)
    return (run.outcomes.tcr > 0) & ~is_cut


def _figures(
    label: str,
    policy: Policy,
    sums: _Sums,
    ours: Floats,
    theirs: Floats,
    *,
    group: str,
    categories: list[int],
    num_prompts: int,
    num_requests: int,
    resamples: Resamples,
) -> PolicyFigures:
    """Of one group: `[1 + B, S]` drawn sums, a policy's and the baseline's."""
    total = dict(zip(COLUMNS, ours[0].tolist(), strict=True))
    has_time = bool(np.isfinite(total["time_us"]))
    left_out = {*(() if has_time else ("tokens_per_s", "tpot_us"))}
    ratios = [name for name in RATIOS if name not in left_out]
    support = 1 - total["missing"] / max(1.0, total["wanted"])
    censored = total["censored"] / total["calls"]
    return PolicyFigures(
        policy=label,
        group=group,
        num_prompts=num_prompts,
        num_requests=num_requests,
        num_tokens=int(total["tokens"]),
        calls=int(total["calls"]),
        verified_tokens=int(total["verified"]),
        num_accepted=int(total["accepted"]),
        drafted_levels=int(total["levels"]),
        time_us=total["time_us"] if has_time else None,
        histogram=tuple(_of_categories(sums.lengths, categories).tolist()),
        tcr_quantiles=rank_quantiles(_of_categories(sums.ranks, categories)),
        expansion_support=support,
        censored_share=censored,
        is_marked=min(support, 1 - censored) < MARKED_BELOW,
        ratios={n: resamples.read(figure_of(COLUMNS, RATIOS[n])(ours)) for n in ratios},
        bounds=_bounds(sums.bounds[categories].sum(0), total["tokens"]),
        against={
            name: resamples.read(of(ours) / of(theirs))
            for name in COMPARED
            if np.isfinite(total[name])
            for of in (figure_of(COLUMNS, itemgetter(name)),)
        },
    )


def rank_quantiles(counts: Longs) -> dict[str, int]:
    """p50, p90 and p99 of terminal ranks, from how often each occurs; nothing of none."""
    if not counts.any():
        return {}
    # As `np.quantile` of the ranks themselves with method="inverted_cdf".
    places = [max(0, math.ceil(counts.sum() * level - 1)) for level in (0.5, 0.9, 0.99)]
    levels = np.searchsorted(counts.cumsum(), places, side="right")
    return dict(zip(("p50", "p90", "p99"), map(int, levels), strict=True))


def _bounds(totals: Floats, tokens: float) -> dict[str, Bound]:
    """Of sums `[4]`, as the fields of `RequestBounds`."""
    low, high, *verified = totals.tolist()
    return {
        "calls": Bound(low=low, high=high),
        "verified_tokens": Bound(low=verified[0], high=verified[1]),
        "tokens_per_call": Bound(low=tokens / high, high=tokens / low),
    }
