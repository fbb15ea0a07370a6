"""Sections on results of other verbs: replayed policies, measured runs, the ladder."""

from __future__ import annotations

from specctl.formatting import Table, count, listed, number
from specctl.report.page import Section
from specctl.report.paper_figures import (
    NO_ABLATION,
    ablation_figure,
    runtime_figure,
    utilisation_figure,
    utilisation_table,
)
from specctl.results import (
    LadderResult,
    ReplayScores,
    RunScores,
)

BY_PROMPT = "95% intervals resample prompts"


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
            f.policy + ("*" if f.is_marked else ""),
            f"{f.calls:,}",
            f"{f.verified_tokens:,}",
            f.tau.text(".2f"),
            number(f.tokens_per_s, ".0f"),
            *(number(f.against.get(name)) for name in ("calls", "time_us")),
            f"{f.expansion_support:.2%}",
        )
        for f in figures
    ]
    boxes, used = utilisation_figure(replay), utilisation_table(replay)
    ablation = ablation_figure(replay)
    return Section(
        "policies",
        reading=reading,
        basis=f"n = {count(first.num_prompts, 'prompt')}, {count(first.num_tokens, 'token')}; "
        f"{BY_PROMPT}; × is relative to {replay.baseline}, paired by prompt.",
        figures=[figure for figure in (boxes, ablation) if figure is not None],
        tables=[
            Table("Policies (* marks support under 99%)", columns, rows),
            *([] if used is None else [used]),
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
        + ([NO_ABLATION] if ablation is None else []),
        data=replay,
    )


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
        figures=[runtime_figure(run)],
        tables=[Table("Measured", columns, rows)],
        data=run,
    )


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
