"""Sections on results of other verbs: replayed policies, measured runs, the ladder."""

from __future__ import annotations

import math

from specctl.formatting import Table, count, listed, number, part
from specctl.replay.facts import TRAINED, prompt_notes
from specctl.replay.ladder.result import LadderResult, ladder_notes, ladder_table, ladder_verdict
from specctl.replay.results import ReplayScores, fewest_calls, replay_result
from specctl.report.charts import Chart, Series
from specctl.report.given import RunScores
from specctl.report.page import Figure, Section
from specctl.watch.drift import DriftScores

BY_PROMPT = "95% intervals resample prompts, each by itself"


def policies_section(replay: ReplayScores) -> Section:
    """Policies side by side."""
    figures = [policy.pooled for policy in replay.policies]
    first = figures[0]
    judged = [f for f in figures if replay.is_unseen(f.policy) and not f.is_marked]
    result = replay_result(replay)
    reading = fewest_calls(replay, figures)
    if judged:
        fewest = min(judged, key=lambda f: f.calls)
        reading += f" {fewest.policy}: τ {fewest.tau.text('.2f')} tokens per call."
    if all(f.tokens_per_s is None for f in figures):
        reading += " Without a cost model there are no times."
    elif result.verdict not in reading:
        reading += f" {result.verdict}"
    return Section(
        "policies",
        reading=reading,
        basis=f"n = {count(first.num_prompts, 'prompt')}, {count(first.num_tokens, 'token')}; "
        f"{BY_PROMPT}.",
        tables=result.tables,
        notes=[
            *result.lines,
            "Calls are the target's, verified are the tokens that it checked, support is the share "
            "of the draft expansions needed that the log holds.",
        ],
        data=replay,
    )


def runs_section(run: RunScores) -> Section:
    """Measured policies, in wall time."""
    facts, same = run.facts, [one.policy for one in run.policies if one.equal_to_ar]
    reading = facts.verdict or "One policy ran, so there is no verdict on speed."
    if differ := [one.policy for one in run.policies if one.equal_to_ar is False]:
        reading += f" The texts of {listed(differ)} differ from plain decoding's."
    elif same:
        reading += " All texts equal plain decoding's, token for token."
    fitted = [one.policy for one in run.policies if one.num_prompts_fitted_on]
    waited = facts.waiting_frac
    waiting = "" if waited is None else f"; {waited:.0%} of the time was waiting for a processor"
    decoded = part(facts.num_prompts, facts.num_prompts_given, "prompt")
    over = "× plain" if run.has_plain else f"× {run.policies[0].policy}"
    columns = ("policy", "calls", "verified", "τ", "tokens/s", over)
    rows = [
        (
            one.policy + TRAINED * bool(one.num_prompts_fitted_on),
            f"{one.calls:,}",
            f"{one.verified_tokens:,}",
            f"{one.mean_acceptance_length:.2f}",
            f"{one.tokens_per_s:.0f}",
            "-" if one.paired is None else one.paired.speedup.text(".2f"),
        )
        for one in run.policies
    ]
    return Section(
        "runs",
        reading=reading,
        basis=f"n = {decoded}, at most {facts.max_new_tokens} new tokens a turn; {facts.device}, "
        f"{facts.dtype}, {count(facts.num_threads, 'thread')}, "
        f"batch size {facts.batch_size}; Σ tokens / Σ time, policies in turns, prompt by prompt, "
        f"in shuffled order; intervals over turns{waiting}.",
        tables=[Table("Measured", columns, rows)],
        notes=[*prompt_notes(facts.num_prompts_left_out, fitted)],
        data=run,
    )


def drift_section(drift: DriftScores) -> Section:
    """The evidence of a change over a watch, and the signals that moved."""
    moved = [signal for signal in drift.signals if signal.moved]
    reading = f"{drift.policy}: no alarm, evidence at most {number(drift.most_wealth, '.2g')}."
    if (rang := drift.alarm_at) is not None:
        at = f" ({rang.finished} UTC)" if rang.finished else ""
        first = (*moved, *drift.signals)[0]
        reading = (
            f"{drift.policy} no longer fits: the alarm rang at {drift.unit} {rang.index + 1}{at}. "
            f"Foremost {first.signal}: {first.before.text('.3g')} before {drift.unit} "
            f"{first.since.index + 1}, {first.after.text('.3g')} since."
        )
    rows = [
        (
            one.signal,
            f"{one.since.index + 1:,}",
            one.since.finished or "-",
            one.before.text(".3g"),
            one.after.text(".3g"),
            f"{one.most_wealth:.2g}",
        )
        for one in moved
    ]
    columns = ("signal", f"since {drift.unit}", "UTC", "before", "since", "evidence")
    notes = [
        f"While nothing changes the alarm rings with probability {drift.alpha:g} at most, over the "
        "whole watch and all signals. Evidence of one signal says which moved; the promise is of "
        "all together.",
        *(() if drift.price is None else drift.price.shown()),
    ]
    return Section(
        "drift",
        reading=reading,
        basis=f"n = {count(drift.num_units, drift.unit)} in order of time, against "
        f"{drift.num_reference:,} of the reference; 95% intervals by {drift.unit}.",
        figures=[_evidence_figure(drift)],
        tables=[Table("What moved", columns, rows)] if rows else [],
        notes=notes,
        data=drift,
    )


MOST_DRAWN = 8.0
"""Evidence is drawn up to 10 to this power."""


def _evidence_figure(drift: DriftScores) -> Figure:
    """The evidence of the groups with most, on a log scale."""
    curves, bar = drift.evidence.log10, -math.log10(drift.alpha)
    units = [index + 1 for index in drift.evidence.index]
    groups = sorted((name for name in curves if name != "all"), key=lambda name: -max(curves[name]))
    series = [
        Series(name, units, [min(value, MOST_DRAWN) for value in curves[name]], style=style)
        for style, name in enumerate(("all", *groups[:4]))
    ]
    level = [bar]
    series.append(Series("rings here", units[:1], level, level, level, kind="level", style=5))
    alt = f"Evidence over {count(drift.num_units, drift.unit)}, the alarm at {bar:.1f}: "
    alt += ", ".join(f"{one.label} ends at {one.y[-1]:.1f}" for one in series[:-1])
    caption = (
        "Evidence of a change, as a power of ten: of all signals together, by which the alarm "
        f"rings, and of the groups with most. Drawn up to {MOST_DRAWN:.0f}."
    )
    chart = Chart(f"{alt}.", "prompts", "evidence, log10", series, whole_x=True)
    return Figure(caption, chart)


def ladder_section(ladder: LadderResult) -> Section:
    """Rungs from plain decoding to the optimum."""
    return Section(
        "ladder",
        reading=ladder_verdict(ladder),
        basis=f"n = {count(ladder.num_prompts.held_out, 'held-out prompt')}, tuned and calibrated "
        f"on {ladder.num_prompts.train:,} others; batch size {ladder.batch_size}; {BY_PROMPT}.",
        tables=[ladder_table(ladder)],
        notes=[*ladder_notes(ladder)],
        data=ladder,
    )
