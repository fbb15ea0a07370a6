"""Figures of simulated serving with intervals over independent runs, and totals of one run in the
order of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specctl.logs.positions import Bools
from specctl.policy import policy_digest
from specctl.replay.batch_simulation import Simulation
from specctl.replay.facts import MARKED_BELOW, ResultRecord
from specctl.replay.metrics import PERCENTILES, Measure, Sums, Totals, ratio
from specctl.stats import Interval, Resamples

GOODPUT = ("goodput_share", "goodput_tokens_per_s")
"""Figures with a limit: the share of requests whose time per output token is within it, and the
rate of their tokens, a share of the rate of all tokens."""
SHOWN = (
    *("tokens_per_s", "mean_acceptance_length", "verified_per_step", "padding_share"),
    *("requests_per_step", "occupancy", "tpot_us", "ttft_us"),
    *(f"{kind}_p{level}_us" for kind in ("tpot", "ttft") for level in PERCENTILES),
    *GOODPUT,
)
COMPARED = ("tokens_per_s", "tpot_us", "tpot_p50_us", "tpot_p99_us", "ttft_us")


class BatchFigures(ResultRecord):
    """Figures of one policy under one load, over R independent runs.

    Intervals are percentile bootstraps over runs. They cover the order of requests and arrivals,
    not the choice of prompts, and are narrow with few runs (of 8, a nominal 95% covers about 90%).
    With one run they are NaN.
    """

    policy: str
    batch_size: int
    packing: str
    num_runs: int  # R
    num_requests: int  # of each run
    tpot_limit_us: float | None  # of goodput; None without goodput figures
    # figures without ramp-up and drain (`steady_window`), by the names of `SHOWN`; None if a run
    # has no such part
    steady: dict[str, Interval] | None
    whole: dict[str, Interval]  # of all steps and requests
    # ratios to the baseline's, paired by run; None without a baseline or a steady part
    against: dict[str, Interval] | None
    expansion_support: float  # share of the wanted expansions in the log
    censored_share: float  # share of rounds whose accepted path reaches a missing expansion
    # the log supports less than 99% of expansions or rounds; without bounds, as a missing child
    # changes later batches
    is_marked: bool


def figures_of(
    label: str,
    runs: Sequence[Simulation],
    *,
    baseline: Sequence[Simulation] | None = None,
    tpot_limit_us: float | None = None,
    time_error: float | None = None,
    seed: int = 0,
) -> BatchFigures:
    """Figures of runs with different seeds, of `simulate_runs`.

    Args:
        baseline: runs of equal loads and seeds under another policy: the same requests in the same
            order at the same times, so ratios are paired by run.
        time_error: of the clock, see `stats.with_time_error`.
        seed: of the resamples.
    """
    first, resamples = runs[0], Resamples.draw(len(runs), seed=seed, least=2)
    names = [name for name in SHOWN if tpot_limit_us is not None or name not in GOODPUT]
    measure = Measure(resamples, time_error, seed)
    whole = [Window(slice(0, len(r.rounds.first)), slice(0, len(r.logged))) for r in runs]
    windows, against, steady = _steady_windows(runs), None, None
    if windows is not None:
        ours = _drawn(runs, windows, measure, tpot_limit_us)
        steady = measure.figures(names, ours)
        others = _steady_windows(baseline or ())
        if baseline and others is not None:
            theirs = _drawn(baseline, others, measure)
            against = {n: measure.against(ratio(n, ours), ratio(n, theirs)) for n in COMPARED}

    def total(name: str) -> float:
        return float(sum(getattr(run.outcomes, name).sum() for run in runs))

    support = 1 - total("missing") / max(1.0, total("wanted"))
    censored = total("censored") / sum(len(run.rounds.row) for run in runs)
    return BatchFigures(
        policy=label,
        batch_size=first.load.batch_size,
        packing=first.packing,
        num_runs=len(runs),
        num_requests=len(first.logged),
        tpot_limit_us=tpot_limit_us,
        steady=steady,
        whole=measure.figures(names, _drawn(runs, whole, measure, tpot_limit_us)),
        against=against,
        expansion_support=support,
        censored_share=censored,
        is_marked=min(support, 1 - censored) < MARKED_BELOW,
    )


class Window(NamedTuple):
    """A part of a run."""

    steps: slice  # whole steps, whose tokens and times are counted
    requests: slice  # whole requests, whose latencies are counted


def steady_window(run: Simulation) -> Window | None:
    """A run of B slots without ramp-up and drain; None if no step or no request is left.

    Steps run from the first that starts after B requests finished, as the first B start together,
    to the last that ends before the last request arrives, as slots become empty then. Latencies
    leave out the first and the last B requests, of which the last finish in small batches.
    """
    num_slots, times = run.load.batch_size, run.timeline
    num_requests = len(run.logged)
    if num_requests <= 2 * num_slots:
        return None
    ramp_end = np.sort(times.finish_us)[num_slots - 1]
    first = int(np.searchsorted(times.start_us, ramp_end))
    last = int(np.searchsorted(times.end_us, times.arrival_us[-1], side="right"))
    if first >= last:
        return None
    return Window(slice(first, last), slice(num_slots, num_requests - num_slots))


def _steady_windows(runs: Sequence[Simulation]) -> list[Window] | None:
    """The windows of all runs; None if one has none."""
    found = [window for window in map(steady_window, runs) if window is not None]
    return found if len(found) == len(runs) else None


def _drawn(
    runs: Sequence[Simulation],
    windows: Sequence[Window],
    measure: Measure,
    tpot_limit_us: float | None = None,
) -> Totals:
    """Totals by name over runs and their resamples."""
    rows = [
        {**_step_sums(run, window.steps), **_request_sums(run, window.requests, tpot_limit_us)}
        for run, window in zip(runs, windows, strict=True)
    ]
    numbers = tuple(map(str, range(len(runs))))
    columns = {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}
    sums = Sums.of(numbers, ("",) * len(runs), columns)
    return measure.drawn(sums, policy_digest(runs[0].submissions.policy))


def _step_sums(run: Simulation, steps: slice) -> Totals:
    """Sums of whole steps; tokens include the first of each request, from reading its prompt."""
    rounds, times = run.rounds, run.timeline
    start, end = times.start_us[steps], times.end_us[steps]
    emitted = rounds.per_step(run.emitted) + rounds.num_joined
    return {
        "tokens": emitted[steps].sum(),
        "time_us": end[-1] - start[0],
        "calls": rounds.batch_sizes[steps].sum(),
        "accepted": rounds.per_step(rounds.accepted)[steps].sum(),
        "verified": rounds.per_step(rounds.verified)[steps].sum(),
        "processed": rounds.processed(run.packing)[steps].sum(),
        "steps": len(start),
        "busy_us": (rounds.scheduled[steps] * (end - start)).sum(),
        "slot_us": run.load.batch_size * (end[-1] - start[0]),
    }


def _request_sums(run: Simulation, requests: slice, tpot_limit_us: float | None) -> Totals:
    times, num_tokens = run.timeline, run.num_tokens[requests]
    decode = (times.finish_us - times.first_token_us)[requests]
    wait = (times.first_token_us - times.arrival_us)[requests]
    tpot = decode / (num_tokens - 1)
    is_good: Bools = tpot <= (np.nan if tpot_limit_us is None else tpot_limit_us)
    percentiles = {
        f"{kind}_p{level}_us": np.percentile(values, level)
        for kind, values in (("tpot", tpot), ("ttft", wait))
        for level in PERCENTILES
    }
    return percentiles | {
        "requests": len(num_tokens),
        "request_us": decode.sum(),
        "decoded": (num_tokens - 1).sum(),
        "wait_us": wait.sum(),
        "good": is_good.sum(),
        "good_tokens": num_tokens[is_good].sum(),
        "request_tokens": num_tokens.sum(),
        "runs": 1,
    }


# ----------------------------------------------------------------- one run in order


class BatchTotals(ResultRecord):
    """Totals of one policy over one run, see `Load.in_order`, without intervals."""

    policy: str
    num_requests: int
    num_tokens: int  # of all texts, the first of each included
    num_steps: int  # forwards of the batch
    calls: int  # target verifications, counted once a request
    num_drafts: int  # of these, verifications of draft tokens
    verified_tokens: int
    # num_drafted, num_accepted: draft tokens
    num_drafted: int
    num_accepted: int
    histogram: tuple[int, ...]  # rounds by accepted draft tokens, from 0 on
    time_us: float | None  # of the whole run, reading prompts included; None without a cost model
    mean_acceptance_length: float
    tokens_per_s: float | None
    draft_utilisation: float | None
    expansion_support: float
    censored_share: float  # of rounds that a deeper log might let accept more; without bounds
    is_marked: bool
    against: dict[str, float]  # ratios to the baseline's


def totals_of(label: str, run: Simulation, baseline: Simulation, *, has_time: bool) -> BatchTotals:
    """Totals of a run in order.

    Args:
        has_time: simulated with a cost model.
    """
    outcomes, num_tokens = run.outcomes, int(run.num_tokens.sum())
    calls, verified = len(outcomes.accepted), int(outcomes.verified.sum())
    num_drafted, num_accepted = verified - calls, int(outcomes.accepted.sum())
    time_us = float(run.timeline.end_us[-1]) if has_time else None
    theirs = baseline.outcomes
    against = {
        "calls": calls / len(theirs.accepted),
        "verified": verified / int(theirs.verified.sum()),
    }
    if time_us is not None:
        against["time_us"] = time_us / float(baseline.timeline.end_us[-1])
    return BatchTotals(
        policy=label,
        num_requests=len(run.logged),
        num_tokens=num_tokens,
        num_steps=len(run.rounds.first),
        calls=calls,
        num_drafts=int((outcomes.verified > 1).sum()),
        verified_tokens=verified,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        histogram=tuple(np.bincount(outcomes.accepted).tolist()),
        time_us=time_us,
        mean_acceptance_length=1 + num_accepted / calls,
        tokens_per_s=None if time_us is None else 1e6 * num_tokens / time_us,
        draft_utilisation=num_accepted / num_drafted if num_drafted else None,
        expansion_support=outcomes.expansion_support,
        censored_share=float(outcomes.censored.mean()),
        is_marked=outcomes.support < MARKED_BELOW,
        against=against,
    )
