"""Figures of policies replayed one request at a time: pooled and by category, with bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from specctl.logs.positions import Bools
from specctl.policy import Policy, policy_digest
from specctl.policy.family import MAX_DEPTH
from specctl.replay.facts import MARKED_BELOW, ResultRecord
from specctl.replay.metrics import Measure, Sums, Totals, by_prompt, expansion_support, request_sums
from specctl.replay.rounds import Clock, Rounds
from specctl.stats import Interval, Number, Resamples

TIMED = ("tokens_per_s", "tpot_us")
"""Figures of time."""
SHOWN = (
    *("mean_acceptance_length", "calls_per_token", "verified_per_token", "levels_per_call"),
    *("draft_utilisation", *TIMED),
)
COMPARED = ("calls", "verified", "time_us")
"""Sums that are compared with the baseline's, paired by prompt."""
LENGTHS = tuple(f"rounds_{length}" for length in range(MAX_DEPTH + 1))
"""Columns of rounds by accepted draft tokens."""


class Bound(ResultRecord):
    """Least and most of a figure, over all contents of missing expansions."""

    low: Number
    high: Number


class PolicyFigures(ResultRecord):
    """Figures of one policy on one group of requests."""

    policy: str  # its label
    group: str  # `all` or a category
    num_prompts: int
    num_requests: int
    num_tokens: int  # emitted by rounds, so without the first of each request
    calls: int
    verified_tokens: int
    num_accepted: int
    drafted_levels: int
    time_us: float | None
    histogram: tuple[int, ...]  # rounds by accepted draft tokens, from 0 on
    expansion_support: float  # share of the wanted expansions in the log
    censored_share: float  # share of rounds whose accepted path reaches a missing expansion
    is_marked: bool  # the log supports less than 99% of expansions or rounds
    ratios: dict[str, Interval]  # by the names of `SHOWN`; times need a cost model
    bounds: dict[str, Bound]  # of calls, verified tokens and tau
    against: dict[str, Interval]  # ratios to the baseline's `COMPARED`, paired by prompt

    @property
    def tau(self) -> Interval:
        """Mean acceptance length, tokens per call."""
        return self.ratios["mean_acceptance_length"]

    @property
    def tokens_per_s(self) -> Interval | None:
        return self.ratios.get("tokens_per_s")


class PolicyScores(ResultRecord):
    """One policy: all requests pooled, and each category."""

    policy: str
    pooled: PolicyFigures
    by_category: tuple[PolicyFigures, ...]


def sums_to_score(run: Rounds, clock: Clock | None = None) -> Sums:
    """Sums of rounds, their bounds, and rounds by accepted tokens."""
    columns, number = request_sums(run, clock), run.positions.num_requests
    columns |= {"request_us": columns["time_us"], "decoded": columns["tokens"]}
    columns |= {"requests": np.ones(number)}
    if run.bounds is not None:
        columns |= vars(run.bounds)
    lengths = run.outcomes.accepted
    for length, name in enumerate(LENGTHS[: int(lengths.max(initial=0)) + 1]):
        of = np.bincount(run.request[lengths == length], minlength=number)
        columns[name] = of.astype(np.float64)
    return by_prompt(run.positions, columns)


def score(
    labels: Sequence[str],
    policies: Sequence[Policy],
    found: Sequence[Sums],
    *,
    baseline: int = 0,
    time_error: float | None = None,
    seed: int = 0,
) -> list[PolicyScores]:
    """Scores policies side by side.

    Args:
        found: of `sums_to_score`, with the same prompts under every policy.
        baseline: index of the policy to compare with.
        time_error: of the clock, see `stats.with_time_error`. seed: of the resamples.
    """
    scores: list[list[PolicyFigures]] = []
    for group, inside in _groups(found[0]):
        parts = [sums.take(inside) for sums in found]
        measure = Measure(Resamples.draw(len(parts[0].rows), seed=seed), time_error, seed)
        drawn = [
            measure.drawn(sums, policy_digest(policy))
            for sums, policy in zip(parts, policies, strict=True)
        ]
        scores.append(
            [
                _figures(label, group, sums, ours, drawn[baseline], measure)
                for label, sums, ours in zip(labels, parts, drawn, strict=True)
            ]
        )
    return [
        PolicyScores(policy=label, pooled=pooled, by_category=tuple(categories))
        for label, (pooled, *categories) in zip(labels, zip(*scores, strict=True), strict=True)
    ]


def _groups(sums: Sums) -> Iterator[tuple[str, Bools]]:
    """All prompts, then the prompts of each category with a name."""
    groups = np.array(sums.groups)
    yield "all", np.ones(len(groups), np.bool_)
    for name in sorted({*sums.groups} - {""}):
        yield name, groups == name


def _figures(
    label: str, group: str, sums: Sums, ours: Totals, theirs: Totals, measure: Measure
) -> PolicyFigures:
    total = sums.totals
    has_time = math.isfinite(total["time_us"])
    support, censored = expansion_support(total), total["censored"] / total["calls"]
    lengths = [total[name] for name in LENGTHS if name in total]
    while lengths and not lengths[-1]:  # of other prompts
        lengths.pop()
    return PolicyFigures(
        policy=label,
        group=group,
        num_prompts=len(sums.rows),
        num_requests=int(total["requests"]),
        num_tokens=int(total["tokens"]),
        calls=int(total["calls"]),
        verified_tokens=int(total["verified"]),
        num_accepted=int(total["accepted"]),
        drafted_levels=int(total["levels"]),
        time_us=total["time_us"] if has_time else None,
        histogram=tuple(map(int, lengths)),
        expansion_support=support,
        censored_share=censored,
        is_marked=min(support, 1 - censored) < MARKED_BELOW,
        ratios=measure.figures((n for n in SHOWN if has_time or n not in TIMED), ours),
        bounds=_bounds(total),
        against={
            name: measure.against(ours[name], theirs[name])
            for name in COMPARED
            if math.isfinite(total[name])
        },
    )


def _bounds(total: Totals) -> dict[str, Bound]:
    low, high = total["calls_low"], total["calls_high"]
    fewest, most = (total["tokens"] + total[f"past_end_{end}"] for end in ("low", "high"))
    return {
        "calls": Bound(low=low, high=high),
        "verified_tokens": Bound(low=total["verified_low"], high=total["verified_high"]),
        "mean_acceptance_length": Bound(low=fewest / high, high=most / low),
    }
