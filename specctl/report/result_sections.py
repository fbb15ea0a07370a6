"""Sections on results of other verbs: replayed policies, measured runs, the ladder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from specctl.formatting import Table, count, listed, number
from specctl.report.charts import BACKGROUND, Chart, Row, Rows, Series
from specctl.report.page import Figure, Section
from specctl.results import (
    DriftScores,
    LadderResult,
    PolicyFigures,
    PolicyScores,
    ReplayScores,
    RunScores,
    Spread,
)

BY_PROMPT = "95% intervals resample prompts"
MAX_CATEGORIES = 3
"""Categories whose utilisation is drawn, beside that of all requests."""
TIMES = {"draft_us": "draft", "verify_us": "verify", "policy_us": "policy", "other_us": "other"}
"""Parts of a round's time, in words."""
NO_ABLATION = (
    "C2T's ablation (Table 1) is drawn where fits on different features are replayed together: "
    "specctl fit c2t TRACES --features ... -o each, and specctl replay TRACES with -p of each."
)


def policies_section(replay: ReplayScores | None) -> Section:
    """Policies side by side."""
    if replay is None:
        return Section(
            "policies",
            missing="(no data supplied: give --results replay.json of specctl replay)",
        )
    figures = [policy.pooled for policy in replay.policies]
    first, fewest, fastest = (
        figures[0],
        min(figures, key=lambda f: f.calls),
        max(figures, key=lambda f: f.tokens_per_s.value if f.tokens_per_s else 0),
    )
    reading = f"{fewest.policy} needs the fewest calls, τ {fewest.tau.text('.2f')} tokens per call"
    if fastest.tokens_per_s is None:
        reading += ". Without a cost model nothing is said of time."
    else:
        rate = fastest.tokens_per_s.text(".0f")
        reading += f"; {fastest.policy} is fastest under the cost model, {rate} tokens/s."
    columns = ("policy", "calls", "verified", "τ", "tokens/s", "calls ×", "time ×", "support")
    rows = [
        (
            marked(f),
            f"{f.calls:,}",
            f"{f.verified_tokens:,}",
            f.tau.text(".2f"),
            number(f.tokens_per_s, ".0f"),
            *(number(f.against.get(name)) for name in ("calls", "time_us")),
            f"{f.expansion_support:.2%}",
        )
        for f in figures
    ]
    used, ablation = _utilisation(replay), _ablation(replay)
    return Section(
        "policies",
        reading=reading,
        basis=f"n = {count(first.num_prompts, 'prompt')}, {count(first.num_tokens, 'token')}; "
        f"{BY_PROMPT}; × is relative to {replay.baseline}, paired by prompt.",
        figures=[*([_utilisation_figure(used)] if used else []), *ablation],
        tables=[
            Table("Policies (* marks support under 99%)", columns, rows),
            *([spread_table("Utilisation per request", used["all requests"])] if used else []),
        ],
        notes=[
            "Calls are the target's, verified are the tokens that it checked, support is the share "
            "of the draft expansions needed that the log holds."
        ]
        + [
            f"{f.policy} is marked: the log holds {f.expansion_support:.1%} of its expansions and "
            f"{f.censored_share:.1%} of its rounds run out of it; its calls are bounded by "
            f"{f.bounds['calls'].low:.0f} to {f.bounds['calls'].high:.0f}."
            for f in figures
            if f.is_marked
        ]
        + ([] if ablation else [NO_ABLATION]),
        data=replay,
    )


def marked(figures: PolicyFigures) -> str:
    """The policy's label, with a star where the log supports too little of it."""
    return figures.policy + ("*" if figures.is_marked else "")


def spread_table(title: str, spreads: Mapping[str, Spread]) -> Table:
    """The numbers of box plots."""
    rows = [
        (name, *(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for _, value in one))
        for name, one in spreads.items()
    ]
    return Table(title, ("", "requests", "5%", "25%", "median", "75%", "95%", "mean"), rows)


def _utilisation(replay: ReplayScores) -> dict[str, dict[str, Spread]]:
    """By group of requests and policy, of those that draft; the largest categories follow all."""
    whole = [policy.pooled for policy in replay.policies]
    groups: list[tuple[str, Sequence[PolicyFigures]]] = [("all requests", whole)]
    categories = [
        (of[0].group, of) for of in zip(*(p.by_category for p in replay.policies), strict=True)
    ]
    if len(categories) > 1:
        groups += sorted(categories, key=lambda pair: -pair[1][0].num_requests)[:MAX_CATEGORIES]
    found = {
        name: {marked(f): f.utilisation for f in of if f.utilisation is not None}
        for name, of in groups
    }
    return {name: spreads for name, spreads in found.items() if spreads}


def _utilisation_figure(found: Mapping[str, Mapping[str, Spread]]) -> Figure:
    return Figure(
        "Utilisation u of each request: accepted draft tokens over drafted levels. Boxes span the "
        "quartiles, whiskers 5 to 95%, the diamond is the mean over requests.",
        [Rows.boxes(f"u, {name}", of, x_range=(0.0, 1.0)) for name, of in found.items()],
        ("ECHO", "Figure 4"),
    )


def _ablation(replay: ReplayScores) -> list[Figure]:
    """Scorers by the features that they read; nothing below two sets of features."""
    fitted = [policy for policy in replay.policies if policy.scorer_features]
    if len({policy.scorer_features for policy in fitted}) < 2:
        return []
    shown = [p for p in replay.policies if p.scorer_features or p.policy == replay.baseline]
    charts = []
    for label, key, bound in (
        ("τ (tokens per call)", "mean_acceptance_length", "tokens_per_call"),
        ("verified tokens per output token", "verified_per_token", "verified_tokens"),
    ):
        rows = [_ablation_row(policy, key, bound) for policy in shown]
        alt = f"Bars of {label}: {'; '.join(row.name for row in rows)}."
        charts.append(Rows.of(alt, label, rows))
    return [
        Figure(
            "Scorers by the features that they read, beside the baseline; a line without a bar is "
            "the range that the log leaves open.",
            charts,
            ("C2T", "Table 1"),
        )
    ]


def _ablation_row(policy: PolicyScores, key: str, bound: str) -> Row:
    """A bar with its interval, or the range of a marked policy."""
    of, features = policy.pooled, policy.scorer_features
    style = 0 if features else BACKGROUND
    name = " + ".join(features or (policy.policy,))
    if of.is_marked:
        per = of.num_tokens if bound == "verified_tokens" else 1
        low, high = of.bounds[bound].low / per, of.bounds[bound].high / per
        return Row(f"{name}*: {low:.2f} to {high:.2f}", ends=(low, high), style=style)
    value = of.ratios[key]
    text = f"{name}: {value.text('.2f')}"
    return Row(text, (value.value,), (value.low, value.high), style=style)


def runs_section(run: RunScores | None) -> Section:
    """Policies as they ran, in wall time."""
    if run is None:
        return Section(
            "runs", missing="(no data supplied: give --run results.json of specctl run --compare)"
        )
    facts, best = run.facts, run.fastest
    faster, same = run.speedup(best), [one.policy for one in run.policies if one.equal_to_ar]
    reading = f"{best.policy} was fastest, {best.tokens_per_s:.0f} tokens/s"
    reading += "." if faster is None else f", × {faster:.2f} of plain decoding."
    if differ := [one.policy for one in run.policies if one.equal_to_ar is False]:
        reading += f" The texts of {listed(differ)} differ from plain decoding's."
    elif same:
        reading += " All texts equal plain decoding's, token for token."
    columns = ("policy", "calls", "verified", "τ", "tokens/s", "× plain")
    rows = [
        (
            one.policy,
            f"{one.calls:,}",
            f"{one.verified_tokens:,}",
            f"{one.mean_acceptance_length:.2f}",
            f"{one.tokens_per_s:.0f}",
            number(run.speedup(one)),
        )
        for one in run.policies
    ]
    return Section(
        "runs",
        reading=reading,
        basis=f"n = {count(facts.num_prompts, 'prompt')}, {best.num_tokens:,} tokens at most "
        f"{facts.max_new_tokens} a turn; {facts.device}, {facts.dtype}, "
        f"{count(facts.num_threads, 'thread')}, batch size {facts.batch_size}; Σ tokens / Σ time, "
        "one run, one policy after the other, no intervals.",
        figures=[_time_figure(run)],
        tables=[Table("Measured", columns, rows)],
        data=run,
    )


def _time_figure(run: RunScores) -> Figure:
    rows, verified = [], []
    for one in run.policies:
        times = [getattr(one, name) for name in TIMES]
        shares = [time / max(sum(times), 1e-9) for time in times]
        rows.append(Row(one.policy, shares))
        verified.append(f"{one.policy} {shares[1]:.0%}")
    chart = Rows.of(
        "Stacked bars of the shares of drafting, verification, decisions and the rest in the time "
        f"of rounds. Verification: {', '.join(verified)}.",
        "share of the rounds' time",
        rows,
        legend=tuple(TIMES.values()),
        x_range=(0.0, 1.0),
    )
    caption = (
        "Where the time of rounds goes, without the reading of prompts: by policy, where the "
        "paper has models of different sizes."
    )
    return Figure(caption, [chart], ("HeteroSpec", "Figure 1b"))


def drift_section(drift: DriftScores | None) -> Section:
    """The evidence of a change over prompts, and what moved."""
    if drift is None:
        return Section(
            "drift", missing="(no data supplied: give --drift drift.json of specctl drift)"
        )
    moved = [signal for signal in drift.signals if signal.moved]
    reading = f"{drift.policy}: no alarm, evidence at most {number(drift.most_wealth, '.2g')}."
    if (rang := drift.alarm_at) is not None:
        at = f" ({rang.finished} UTC)" if rang.finished else ""
        first = moved[0]
        reading = (
            f"{drift.policy} no longer fits: the alarm rang at prompt {rang.index + 1}{at}. "
            f"Foremost {first.signal}: {first.before.text('.3g')} before prompt "
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
    columns = ("signal", "since prompt", "UTC", "before", "since", "evidence")
    notes = [
        f"While nothing changes the alarm rings with probability {drift.alpha:g} at most, over the "
        "whole watch and all signals. Evidence of one signal says which moved; the promise is of "
        "all together.",
        *(drift.price["words"] if drift.price is not None else ()),
    ]
    if drift.num_unfinished:
        notes.append(f"{count(drift.num_unfinished, 'prompt')} were still being written.")
    return Section(
        "drift",
        reading=reading,
        basis=f"n = {count(drift.num_prompts, 'prompt')} in order of time, against "
        f"{drift.num_reference:,} of the reference; {BY_PROMPT}.",
        figures=[_evidence_figure(drift)],
        tables=[Table("What moved", columns, rows)] if rows else [],
        notes=notes,
        data=drift,
    )


MOST_DRAWN = 8.0
"""Evidence is drawn up to 10 to this power."""


def _evidence_figure(drift: DriftScores) -> Figure:
    """The groups with most evidence; the same step of evidence is the same height."""
    curves, bar = drift.evidence.log10, -math.log10(drift.alpha)
    prompts = [index + 1 for index in drift.evidence.index]
    groups = sorted((name for name in curves if name != "all"), key=lambda name: -max(curves[name]))
    series = [
        Series(name, prompts, [min(value, MOST_DRAWN) for value in curves[name]], style=style)
        for style, name in enumerate(("all", *groups[:4]))
    ]
    level = [bar]
    series.append(Series("rings here", prompts[:1], level, level, level, kind="level", style=5))
    alt = f"Evidence over {count(drift.num_prompts, 'prompt')}, the alarm at {bar:.1f}: "
    alt += ", ".join(f"{one.label} ends at {one.y[-1]:.1f}" for one in series[:-1])
    caption = (
        "Evidence of a change, as a power of ten: of all signals together, by which the alarm "
        f"rings, and of the groups with most. Drawn up to {MOST_DRAWN:.0f}."
    )
    chart = Chart(f"{alt}.", "prompts", "evidence, log10", series, whole_x=True)
    return Figure(caption, [chart])


def ladder_section(ladder: LadderResult | None) -> Section:
    """From plain decoding to the best that is possible."""
    if ladder is None:
        return Section(
            "ladder",
            missing="(no data supplied: give --ladder ladder.json of specctl ladder)",
        )
    best, split = ladder.fastest, ladder.split
    room = (
        f"An estimate of the best any policy can do is {split.headroom.text('.0%')} above "
        f"{ladder.best_static}."
    )
    reading = f"{best.label} is the fastest that can be run. {room}"
    notes = [
        f"Of the rate above R_feat, {split.drafter.text('.0f')} tokens/s are information "
        "that the target has and the drafter's features lack, "
        f"{split.irreducible.text('.0f')} tokens/s are known from the outcome alone.",
        "R_feat and R_prob rest on fitted models and are estimates; R_clair and R_ceil are bounds.",
        *(
            f"{rung.label}: {rung.setting}."
            for rung in ladder.rungs
            if rung.setting not in ("", "as given", "no drafting")
        ),
    ]
    columns = ("rung", "calls", "verified", "τ", "tokens/s", "× static", "gap closed")
    rows = [
        (
            f"{r.label}{'*' if r.is_marked else ''}",
            f"{r.calls:,}",
            f"{r.verified_tokens:,}",
            r.mean_acceptance_length.text(".2f"),
            r.tokens_per_s.text(".0f"),
            r.against_static.text(".2f"),
            # A gap ends at the oracle.
            number(None if r.kind in ("clairvoyant", "ceiling") else r.gap_closed, ".0%"),
        )
        for r in ladder.rungs
    ]
    return Section(
        "ladder",
        reading=reading,
        basis=f"n = {count(ladder.num_prompts.held_out, 'held-out prompt')}, tuned and calibrated "
        f"on {ladder.num_prompts.train:,} others; batch size {ladder.batch_size}; {BY_PROMPT}.",
        tables=[Table("The ladder (* marks support under 99%)", columns, rows)],
        notes=notes,
        data=ladder,
    )
