"""Figures of simulated serving with intervals over prompts and runs, and totals of one run in the
order of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specctl.logs.positions import Bools
from specctl.policy import policy_digest
from specctl.replay.batch_simulation import Simulation
from specctl.replay.facts import MARKED_BELOW, ResultRecord
from specctl.replay.metrics import PERCENTILES, Columns, Measure, Sums, Totals, by_prompt, ratio
from specctl.stats import Interval, resample, sums_by

GOODPUT = ("goodput_share", "goodput_tokens_per_s")
"""Figures with a limit: the share of requests whose time per output token is within it, and the
rate of their tokens, a share of the rate of all tokens."""
OF_RUNS = tuple(f"{kind}_p{level}_us" for kind in ("tpot", "ttft") for level in PERCENTILES)
"""Percentiles over the requests of a run, averaged over runs; they have no intervals."""
SHOWN = (
    *("tokens_per_s", "mean_acceptance_length", "verified_per_step", "padding_share"),
    *("requests_per_step", "occupancy", "tpot_us", "ttft_us"),
    *OF_RUNS,
    *GOODPUT,
)
COMPARED = ("tokens_per_s", "tpot_us", "tpot_p50_us", "tpot_p99_us", "ttft_us")


class BatchFigures(ResultRecord):
    """Figures of one policy under one load, over R independent runs.

    Intervals resample prompts and runs, see `resample`: they cover the choice of prompts, and the
    order of requests and arrivals.
    """

    policy: str
    batch_size: int
    packing: str
    num_runs: int  # R
    num_requests: int  # of each run
    num_prompts: int
    tpot_limit_us: float | None  # of goodput; None without goodput figures
    # figures without ramp-up and drain (`steady_window`), by the names of `SHOWN`; None if a run
    # has no such part
    steady: dict[str, Interval] | None
    whole: dict[str, Interval]  # of all steps and requests
    # ratios to the baseline's, paired by prompt and run; None without a baseline or a steady part
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
            order at the same times, so ratios are paired by prompt and run.
        time_error: of the clock, see `stats.with_time_error`.
        seed: of the resamples.
    """
    first, num_prompts = runs[0], len(_prompts(runs))
    resamples = resample(num_prompts, len(runs), seed)
    names = [name for name in SHOWN if tpot_limit_us is not None or name not in GOODPUT]
    measure = Measure(resamples, time_error, seed)
    whole = [Window(slice(0, len(r.rounds.first)), slice(0, len(r.logged))) for r in runs]
    windows, against, steady = _steady_windows(runs), None, None
    if windows is not None:
        ours = _drawn(runs, windows, measure, tpot_limit_us)
        steady = _figures(names, ours, measure)
        others = _steady_windows(baseline or ())
        if baseline and others is not None:
            theirs = _drawn(baseline, others, measure)
            against = _figures(COMPARED, ours, measure, theirs)

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
        num_prompts=num_prompts,
        tpot_limit_us=tpot_limit_us,
        steady=steady,
        whole=_figures(names, _drawn(runs, whole, measure, tpot_limit_us), measure),
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


def _figures(
    names: Sequence[str], ours: Totals, measure: Measure, theirs: Totals | None = None
) -> dict[str, Interval]:
    """Figures of `_drawn` totals, or their ratios to another policy's."""
    found = {}
    for name in names:
        of, *beside = (
            of[name] if name in OF_RUNS else ratio(name, of)
            for of in (ours, theirs)
            if of is not None
        )
        drawn = of / beside[0] if beside else of
        found[name] = measure.resamples.read(drawn)
    return found


def _drawn(
    runs: Sequence[Simulation],
    windows: Sequence[Window],
    measure: Measure,
    tpot_limit_us: float | None = None,
) -> Totals:
    """Totals by name over prompts and runs, and over resamples; percentiles over all alone."""
    prompts = _prompts(runs)
    tables, percentiles = [], []
    for run, window in zip(runs, windows, strict=True):
        columns = _step_columns(run, window.steps)
        of_requests, levels = _request_columns(run, window.requests, tpot_limit_us)
        sums = by_prompt(run.submissions.positions, columns | of_requests, run.logged)
        tables.append(sums.select(prompts))
        percentiles.append(levels)
    table = np.concatenate([one.table for one in tables])
    rows, groups = prompts * len(runs), ("",) * len(table)
    sums = Sums(rows, groups, tables[0].names, table)
    unknown = np.full(len(measure.resamples.weights), np.nan)
    return measure.drawn(sums, policy_digest(runs[0].submissions.policy)) | {
        name: np.append(np.mean([levels[name] for levels in percentiles]), unknown)
        for name in OF_RUNS
    }


def _prompts(runs: Sequence[Simulation]) -> tuple[str, ...]:
    """Ids of the prompts of all runs."""
    positions = runs[0].submissions.positions
    codes = np.unique(positions.prompt[np.concatenate([run.logged for run in runs])])
    return tuple(positions.prompt_ids[code] for code in codes.tolist())


def _step_columns(run: Simulation, steps: slice) -> Columns:
    """`[M]` sums of each request over whole steps; a step's time is shared equally by its requests.

    Tokens include the first of each request, from reading its prompt.
    """
    rounds, times, number = run.rounds, run.timeline, len(run.logged)
    inside = np.zeros(len(rounds.first), np.bool_)
    inside[steps] = True
    start, end = times.start_us, times.end_us
    until = np.append(start[1:], end[-1])
    last = np.flatnonzero(inside)[-1]
    until[last] = end[last]
    of_step = {
        "time_us": until - start,  # with the wait for the next step
        "processed": rounds.processed(run.packing),
        "steps": np.ones(len(start)),
        "busy_us": rounds.scheduled * (end - start),
        "slot_us": run.load.batch_size * (until - start),
    }
    shares = np.stack([*of_step.values()], 1) * (inside / np.maximum(rounds.scheduled, 1))[:, None]
    counted = inside[rounds.step]
    of_round = {
        "tokens": run.emitted * counted,
        "calls": counted,
        "accepted": rounds.accepted * counted,
        "verified": rounds.verified * counted,
    }
    columns = dict(
        zip(of_round, sums_by(rounds.serial, number, [*of_round.values()]).T, strict=True)
    )
    joined = np.repeat(np.arange(len(start)), rounds.num_joined)
    columns["tokens"] = columns["tokens"] + inside[joined]
    shared = sums_by(rounds.serial, number, shares[rounds.step])
    shared += np.where(rounds.prompt_tokens[joined] > 0, 1, 0)[:, None] * shares[joined]
    return columns | dict(zip(of_step, shared.T, strict=True))


def _request_columns(
    run: Simulation, requests: slice, tpot_limit_us: float | None
) -> tuple[Columns, dict[str, float]]:
    """`[M]` of each request, 0 for those outside the window; and percentiles of the run."""
    times, num_tokens = run.timeline, run.num_tokens
    decode = times.finish_us - times.first_token_us
    wait = times.first_token_us - times.arrival_us
    tpot = decode / (num_tokens - 1)
    is_good: Bools = tpot <= (np.nan if tpot_limit_us is None else tpot_limit_us)
    percentiles = {
        f"{kind}_p{level}_us": float(np.percentile(values[requests], level))
        for kind, values in (("tpot", tpot), ("ttft", wait))
        for level in PERCENTILES
    }
    counted = np.zeros(len(num_tokens))
    counted[requests] = 1
    columns = {
        "requests": counted,
        "request_us": decode * counted,
        "decoded": (num_tokens - 1) * counted,
        "wait_us": wait * counted,
        "good": is_good * counted,
        "good_tokens": num_tokens * is_good * counted,
        "request_tokens": num_tokens * counted,
    }
    return columns, percentiles


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
