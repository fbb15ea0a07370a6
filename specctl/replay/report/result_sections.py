"""Sections on what other verbs found: replayed policies and the ladder."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.replay.report.given import (
    GivenRung,
    LadderResults,
    PolicyFigures,
    ReplayResults,
)
from specctl.replay.report.page import Figure, Section, Table
from specctl.replay.report.ranking import Ranking
from specctl.replay.report.words import BY_PROMPT, NOTHING, count, share, span

BOUND_KINDS = ("features", "oracle", "clairvoyant", "ceiling")
"""Rungs that are no policies."""


def policies_section(results: ReplayResults | None) -> Section:
    """Policies side by side."""
    title = "Replayed policies"
    if results is None:
        return Section(
            "policies",
            title,
            missing="No results of replay were given. Run specctl replay TRACES --policy A "
            "--policy B -o OUT and give --results OUT/replay.json.",
        )
    figures = [policy.pooled for policy in results.policies]
    first = figures[0]
    basis = (
        f"n = {count(first.num_prompts, 'prompt')}, {count(first.num_tokens, 'token')}; "
        f"{BY_PROMPT}; × is relative to {results.baseline}, paired by prompt."
    )
    return Section(
        "policies",
        title,
        reading=_policies_reading(results, figures),
        basis=basis,
        tables=[_policies_table(figures)],
        notes=[_mark_line(f) for f in figures if f.is_marked],
        data=results.model_dump(mode="json"),
    )


def _policies_reading(results: ReplayResults, figures: Sequence[PolicyFigures]) -> str:
    fewest = min(figures, key=lambda f: f.calls)
    calls = f"{fewest.policy} needs the fewest calls, τ {span(fewest.tau)} tokens per call"
    timed = [f for f in figures if f.tokens_per_s is not None]
    if not timed:
        return f"{calls}. Without a cost model nothing is said of time."
    fastest = max(timed, key=lambda f: f.tokens_per_s.value if f.tokens_per_s else 0.0)
    rate = "" if fastest.tokens_per_s is None else span(fastest.tokens_per_s, ".0f")
    return f"{calls}; {fastest.policy} is fastest under the cost model, {rate} tokens/s."


def _policies_table(figures: Sequence[PolicyFigures]) -> Table:
    head = ("policy", "calls", "verified", "τ", "tokens/s", "calls ×", "time ×", "support")
    return Table("Policies (* marks support under 99%)", head, [_row(f) for f in figures])


def _row(f: PolicyFigures) -> tuple[str, ...]:
    ratios = (f.against.get(name) for name in ("calls", "time_us"))
    return (
        f.policy + ("*" if f.is_marked else ""),
        f"{f.calls:,}",
        f"{f.verified_tokens:,}",
        span(f.tau),
        NOTHING if f.tokens_per_s is None else span(f.tokens_per_s, ".0f"),
        *(NOTHING if ratio is None else span(ratio.interval) for ratio in ratios),
        f"{f.expansion_support:.2%}",
    )


def _mark_line(f: PolicyFigures) -> str:
    bound = f.bounds["calls"]
    between = (
        "" if bound.low is None or bound.high is None else f"{bound.low:.0f} to {bound.high:.0f}"
    )
    return (
        f"{f.policy} is marked: the log holds {f.expansion_support:.1%} of its expansions and "
        f"{f.censored_share:.1%} of its rounds run out of it; its calls are bounded by {between}."
    )


def ladder_section(ladder: LadderResults | None) -> Section:
    """From plain decoding to what is possible."""
    title = "The ladder: distance to what is possible"
    if ladder is None:
        return Section(
            "ladder",
            title,
            missing="No ladder was given. Run specctl ladder TRACES --cost-model FILE -o OUT and "
            "give --ladder OUT/ladder.json.",
        )
    sides = ladder.num_prompts
    basis = (
        f"n = {count(sides.get('held_out', 0), 'held-out prompt')}, tuned and calibrated on "
        f"{sides.get('train', 0):,} others; batch size {ladder.batch_size}; {BY_PROMPT}."
    )
    split = ladder.split
    notes = [
        f"Of the rate above R_feat, {span(split.drafter.interval, '.0f')} tokens/s are information "
        "that the target has and the drafter's features lack, "
        f"{span(split.irreducible.interval, '.0f')} tokens/s only the outcome itself tells.",
        "R_feat and R_prob rest on fitted models and are estimates; R_clair and R_ceil are bounds.",
        *(
            f"{rung.label}: {rung.setting}."
            for rung in ladder.rungs
            if rung.setting not in ("", "as given", "no drafting")
        ),
    ]
    return Section(
        "ladder",
        title,
        reading=_ladder_reading(ladder),
        basis=basis,
        figures=[
            Figure(
                "Rate of every rung under the cost model; circles can be run, squares are "
                "estimates and bounds.",
                [_ladder_chart(ladder.rungs)],
            )
        ],
        tables=[_ladder_table(ladder.rungs)],
        notes=notes,
        data=ladder.model_dump(mode="json"),
    )


def best_policy(ladder: LadderResults) -> GivenRung:
    """The fastest rung that can be run."""
    found = [rung for rung in ladder.rungs if rung.kind not in BOUND_KINDS]
    return max(found, key=lambda rung: rung.tokens_per_s.interval.value)


def _ladder_reading(ladder: LadderResults) -> str:
    best = best_policy(ladder)
    head = ladder.split.headroom.interval
    room = f"An estimate of the best any policy can do is {share(head)} above {ladder.best_static}."
    if best.label == ladder.best_static:
        return f"No policy given beats the best static setting, {best.label}. {room}"
    gain = best.against_static.interval
    clear = "clear of 1" if gain.low > 1 else "not clear of 1"
    return (
        f"{best.label} is the fastest that can be run, {span(gain)} times {ladder.best_static} "
        f"({clear}). {room}"
    )


def _ladder_chart(rungs: Sequence[GivenRung]) -> Ranking:
    rows = [(r.label, r.tokens_per_s.interval, 1 if r.kind in BOUND_KINDS else 0) for r in rungs]
    alt = "Rates of the rungs of the ladder with intervals; the table below holds the values."
    return Ranking(alt, "tokens/s", rows)


def _ladder_table(rungs: Sequence[GivenRung]) -> Table:
    head = ("rung", "calls", "verified", "τ", "tokens/s", "× static", "gap closed")
    return Table(
        "The ladder (* marks support under 99%)",
        head,
        [
            (
                f"{r.label}{'*' if r.is_marked else ''}",
                f"{r.calls:,}",
                f"{r.verified_tokens:,}",
                span(r.mean_acceptance_length.interval),
                span(r.tokens_per_s.interval, ".0f"),
                span(r.against_static.interval),
                _gap(r),
            )
            for r in rungs
        ],
    )


def _gap(rung: GivenRung) -> str:
    """Of rungs up to the oracle, which the gap ends at."""
    if rung.gap_closed is None or rung.kind in ("clairvoyant", "ceiling"):
        return NOTHING
    return share(rung.gap_closed.interval)
