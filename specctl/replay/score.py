"""Figures of a replayed policy: pooled and by category, with intervals and support."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.logs.positions import Bools, Floats, Ints
from specctl.policy import ScoredTree
from specctl.replay.rounds import Clock, Rounds
from specctl.results import MARKED_BELOW, Bound, PolicyFigures, PolicyScores, Spread
from specctl.stats import Resamples, figure_of, sums_by

RATIOS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mean_acceptance_length": lambda s: 1 + s["accepted"] / s["calls"],
    "calls_per_token": lambda s: s["calls"] / s["tokens"],
    "verified_per_token": lambda s: s["verified"] / s["tokens"],
    "levels_per_call": lambda s: s["levels"] / s["calls"],
    "draft_utilisation": lambda s: s["accepted"] / (s["verified"] - s["calls"]),
    "copied_share": lambda s: s["copied"] / s["calls"],
    "mean_tcr": lambda s: s["tcr"] / s["num_tcr"],
    "tokens_per_s": lambda s: 1e6 * s["tokens"] / s["time_us"],
    "tpot_us": lambda s: s["time_us"] / s["tokens"],
}
"""Ratios of sums. `draft_utilisation` is accepted over submitted draft tokens; `copied_share`, of
policies that copy, the rounds that did; `tpot_us` the time per output token; both times are the
cost model's, rounds only."""
COMPARED = ("calls", "verified", "time_us")
"""Sums whose ratio to the baseline's is reported, paired by prompt."""


def score(
    labels: Sequence[str],
    runs: Sequence[Rounds],
    *,
    clock: Clock | None = None,
    baseline: int = 0,
    seed: int = 0,
) -> list[PolicyScores]:
    """Scores replayed policies side by side.

    Args:
        runs: of one log, so that prompts agree.
        clock: the cost model's; without it no figure has a time.
        baseline: index of the policy that the others are compared with.
        seed: of the resamples.
    """
    columns = [_columns(run, clock) for run in runs]
    found: list[list[PolicyFigures]] = []
    for group, requests in _groups(runs[0]):
        prompts = np.unique(runs[0].positions.prompt[requests])
        resamples = Resamples.draw(len(prompts), seed=seed)  # the same for every policy
        tables = []
        for run, values in zip(runs, columns, strict=True):
            inside = requests[run.request]
            codes = np.searchsorted(prompts, run.positions.prompt[run.request[inside]])
            tables.append(sums_by(codes, len(prompts), [of[inside] for of in values.values()]))
        figures = partial(
            _figures, group=group, requests=requests, names=tuple(columns[0]), resamples=resamples
        )
        found.append(
            [
                figures(label, run, table, tables[baseline])
                for label, run, table in zip(labels, runs, tables, strict=True)
            ]
        )
    scores = []
    by_policy = zip(labels, runs, zip(*found, strict=True), strict=True)
    for label, run, (pooled, *categories) in by_policy:
        shape = run.policy.shape
        features = shape.scorer.features if isinstance(shape, ScoredTree) else None
        scores.append(
            PolicyScores(
                policy=label,
                scorer_features=features,
                pooled=pooled,
                by_category=tuple(categories),
            )
        )
    return scores


def _groups(run: Rounds) -> Iterator[tuple[str, Bools]]:
    """All requests, then each category that has a name."""
    positions = run.positions
    yield "all", np.ones(positions.num_requests, np.bool_)
    for code, name in sorted(enumerate(positions.categories), key=lambda item: item[1]):
        if name:
            yield name, positions.category == code


def _columns(run: Rounds, clock: Clock | None) -> dict[str, NDArray[Any]]:
    """The amounts that every round adds to each sum, `[M]`."""
    columns, is_whole = run.counts(clock), _has_terminal_rank(run)
    return {**columns, "tcr": np.where(is_whole, columns["tcr"], 0), "num_tcr": is_whole}


def _has_terminal_rank(run: Rounds) -> Bools:
    """`[M]` bool: something was accepted, and the text did not end on the path above its end."""
    accepted = run.outcomes.accepted
    is_cut = (run.emitted <= accepted) & (accepted < run.outcomes.levels)
    return (run.outcomes.tcr > 0) & ~is_cut


def _figures(
    label: str,
    run: Rounds,
    sums: Floats,
    theirs: Floats,
    *,
    group: str,
    requests: Bools,
    names: tuple[str, ...],
    resamples: Resamples,
) -> PolicyFigures:
    """Of one group: `[P, S]` sums by prompt, a policy's and the baseline's, with their names."""
    total = dict(zip(names, sums.sum(0).tolist(), strict=True))
    rounds = requests[run.request]
    has_time = bool(np.isfinite(total["time_us"]))
    left_out = {*(() if has_time else ("tokens_per_s", "tpot_us"))}
    left_out |= {*(() if run.policy.copies else ("copied_share",))}
    ratios = [name for name in RATIOS if name not in left_out]
    support = 1 - total["missing"] / max(1.0, total["wanted"])
    censored = total["censored"] / total["calls"]
    return PolicyFigures(
        policy=label,
        group=group,
        num_prompts=len(sums),
        num_requests=int(requests.sum()),
        num_tokens=int(total["tokens"]),
        calls=int(total["calls"]),
        verified_tokens=int(total["verified"]),
        num_accepted=int(total["accepted"]),
        drafted_levels=int(total["levels"]),
        time_us=total["time_us"] if has_time else None,
        histogram=tuple(np.bincount(run.outcomes.accepted[rounds]).tolist()),
        tcr_quantiles=rank_quantiles(run.outcomes.tcr[rounds & _has_terminal_rank(run)]),
        expansion_support=support,
        censored_share=censored,
        is_marked=min(support, 1 - censored) < MARKED_BELOW,
        ratios={n: resamples.interval(sums, figure_of(names, RATIOS[n])) for n in ratios},
        bounds=_bounds(run, requests, total["tokens"]),
        against={
            name: resamples.ratio(sums, theirs, figure_of(names, itemgetter(name)))
            for name in COMPARED
            if np.isfinite(total[name])
        },
        utilisation=_utilisation(run, rounds),
    )


def _utilisation(run: Rounds, rounds: Bools) -> Spread | None:
    """Accepted draft tokens over drafted levels of each request, of some rounds `[M]`."""
    values = (run.outcomes.accepted[rounds], run.outcomes.levels[rounds])
    accepted, levels = sums_by(run.request[rounds], run.positions.num_requests, values).T
    drafted = levels > 0
    return Spread.of(accepted[drafted] / levels[drafted])


def rank_quantiles(ranks: Ints) -> dict[str, int]:
    """p50, p90 and p99 of terminal ranks; nothing of none."""
    if not len(ranks):
        return {}
    levels = np.quantile(ranks, (0.5, 0.9, 0.99), method="inverted_cdf")
    return dict(zip(("p50", "p90", "p99"), map(int, levels), strict=True))


def _bounds(run: Rounds, requests: Bools, tokens: float) -> dict[str, Bound]:
    b = run.bounds
    assert b is not None, "scored runs have bounds"

    def total(values: Floats) -> float:
        return float(values[requests].sum())

    calls = Bound(low=total(b.calls_low), high=total(b.calls_high))
    verified = Bound(low=total(b.verified_low), high=total(b.verified_high))
    per_call = Bound(low=tokens / calls.high, high=tokens / calls.low)
    return {"calls": calls, "verified_tokens": verified, "tokens_per_call": per_call}
