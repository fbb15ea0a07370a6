"""Sections on results of other verbs: the recommended setting, replayed policies, the ladder."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.formatting import Table, count, number
from specctl.report.charts import Chart, Series
from specctl.report.page import Figure, Section
from specctl.results import (
    RUNNABLE,
    LadderResult,
    PolicyFigures,
    ReplayScores,
    Rung,
    TuneResult,
)

BY_PROMPT = "95% intervals resample prompts"
SAME_PROMPTS = "It was chosen on the prompts that it is shown for, which flatters it."
NOT_TUNED = "specctl tune chooses on training prompts and reports on held-out ones."
NOT_ELSEWHERE = "This holds for prompts like these; another workload needs its own traces."
UNTIMED = (
    "Time was not judged: without a cost model, fewer calls and fewer verified tokens cannot be "
    "weighed against each other. Run specctl profile, then specctl tune."
)


def recommendation(
    replay: ReplayScores | None, ladder: LadderResult | None, tune: TuneResult | None
) -> Section:
    """The setting to run, from the strongest evidence that is given."""
    if tune is not None:
        return _from_tune(tune)
    if ladder is not None:
        return _from_ladder(ladder)
    if replay is not None and replay.policies[0].pooled.tokens_per_s is not None:
        return _from_replay(replay)
    return Section("recommendation", missing=f"None is made. {UNTIMED}")


def _from_tune(tune: TuneResult) -> Section:
    gain = tune.standing(tune.winner_on_train).held_out.against.text(".3f")
    if tune.beats_static:
        reading = f"Run {tune.chosen}: {gain} times the best static setting, {tune.baseline}."
    elif tune.winner_on_train == tune.baseline:
        reading = f"Run {tune.chosen}, the best static setting: no family beat it."
    else:
        reading = (
            f"Run {tune.chosen}, the best static setting. {tune.winner_on_train} was best on "
            f"training prompts and came out at {gain} times its rate on held-out ones: "
            "no gain beyond the interval."
        )
    objective, arrivals = tune.objective, tune.load.arrival_rate_per_s
    rate = tune.standing(tune.chosen).held_out.rate.text(".0f")
    offered = "a closed loop" if arrivals is None else f"{arrivals:g} requests/s"
    load = (
        f"Rates are the cost model's, for {offered} at batch size {tune.load.batch_size}; other "
        "loads may want another setting."
    )
    title = "The best static setting, and the best of each family"
    columns = {
        "setting": "policy",
        "family": "family",
        "tokens/s, held out": "held_out.rate:.0f",
        "× best static": "held_out.against:.3f",
    }
    return Section(
        "recommendation",
        reading=f"{reading} {objective.kind.capitalize()}: {rate} tokens/s.",
        basis=f"Chosen among {count(tune.num_settings, 'setting')} on "
        f"{count(tune.num_prompts.train, 'prompt')}; n = "
        f"{count(tune.num_prompts.held_out, 'held-out prompt')}, which the choice never saw; "
        f"{BY_PROMPT}. Objective: {objective.kind}, {objective.meaning}.",
        tables=[Table.of(title, tune.policies, columns)],
        notes=[f"{load} {tune.approximations}", NOT_ELSEWHERE],
        data=tune,
    )


def _from_ladder(ladder: LadderResult) -> Section:
    best, static = ladder.fastest, ladder.rung(ladder.best_static)
    gain = best.against_static
    words = f"{gain.text('.2f')} times the rate of the best static setting, {static.label}"
    run = static if best is not static and not gain.low > 1 else best
    setting = f" ({run.setting})" if run.setting else ""
    if run is not best:
        reading = (
            f"Run {run.label}{setting}, the best static setting. {best.label} came out at {words}: "
            "no gain beyond the interval."
        )
    elif best is static:
        reading = f"Run {best.label}{setting}: no policy of the ladder beats it."
    else:
        reading = f"Run {best.label}{setting}: {words}."
    notes = [
        f"Static settings were tuned on {count(ladder.num_prompts.train, 'prompt')} and "
        f"all measured on {ladder.num_prompts.held_out:,} others, under a cost model at "
        f"batch size {ladder.batch_size}; other loads may want another setting.",
        f"The fastest of the policies was picked on the prompts it is shown for. {NOT_TUNED}",
        NOT_ELSEWHERE,
    ]
    return Section("recommendation", reading=reading, notes=notes)


def _from_replay(replay: ReplayScores) -> Section:
    best = _fastest(replay)
    assert best.tokens_per_s is not None, "timed results"
    reading = (
        f"Of the policies replayed, {best.policy} is fastest: {best.tokens_per_s.text('.0f')} "
        "tokens/s."
    )
    ratio = best.against.get("time_us")
    if ratio is not None and best.policy != replay.baseline:
        sure = "" if ratio.high < 1 else ", so it may be no faster"
        reading += f" Its time is {ratio.text('.2f')} times that of {replay.baseline}{sure}."
    notes = [f"{SAME_PROMPTS} {NOT_TUNED}", NOT_ELSEWHERE]
    return Section("recommendation", reading=reading, notes=notes)


def _fastest(replay: ReplayScores) -> PolicyFigures:
    """Of timed policies, all of which are timed by one cost model."""
    figures = [policy.pooled for policy in replay.policies]
    return max(figures, key=lambda f: f.tokens_per_s.value if f.tokens_per_s else 0.0)


def policies_section(replay: ReplayScores | None) -> Section:
    """Policies side by side."""
    if replay is None:
        return Section(
            "policies",
            missing="No results of replay were given. Run specctl replay TRACES --policy A "
            "--policy B -o OUT and give --results OUT/replay.json.",
        )
    figures = [policy.pooled for policy in replay.policies]
    first, fewest, fastest = figures[0], min(figures, key=lambda f: f.calls), _fastest(replay)
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
    return Section(
        "policies",
        reading=reading,
        basis=f"n = {count(first.num_prompts, 'prompt')}, {count(first.num_tokens, 'token')}; "
        f"{BY_PROMPT}; × is relative to {replay.baseline}, paired by prompt.",
        tables=[Table("Policies (* marks support under 99%)", columns, rows)],
        notes=[
            f"{f.policy} is marked: the log holds {f.expansion_support:.1%} of its expansions and "
            f"{f.censored_share:.1%} of its rounds run out of it; its calls are bounded by "
            f"{f.bounds['calls'].low:.0f} to {f.bounds['calls'].high:.0f}."
            for f in figures
            if f.is_marked
        ],
        data=replay,
    )


def ladder_section(ladder: LadderResult | None) -> Section:
    """From plain decoding to the best that is possible."""
    if ladder is None:
        return Section(
            "ladder",
            missing="No ladder was given. Run specctl ladder TRACES --cost-model FILE -o OUT and "
            "give --ladder OUT/ladder.json.",
        )
    best, split = ladder.fastest, ladder.split
    room = (
        f"An estimate of the best any policy can do is {split.headroom.text('.0%')} above "
        f"{ladder.best_static}."
    )
    if best.label == ladder.best_static:
        reading = f"No policy given beats the best static setting, {best.label}. {room}"
    else:
        clear = "clear of 1" if best.against_static.low > 1 else "not clear of 1"
        reading = (
            f"{best.label} is the fastest that can be run, {best.against_static.text('.2f')} times "
            f"{ladder.best_static} ({clear}). {room}"
        )
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
    caption = (
        "Rate of every rung under the cost model; circles can be run, squares are estimates and "
        "bounds."
    )
    return Section(
        "ladder",
        reading=reading,
        basis=f"n = {count(ladder.num_prompts.held_out, 'held-out prompt')}, tuned and calibrated "
        f"on {ladder.num_prompts.train:,} others; batch size {ladder.batch_size}; {BY_PROMPT}.",
        figures=[Figure(caption, [_ladder_chart(ladder.rungs)])],
        tables=[Table("The ladder (* marks support under 99%)", columns, rows)],
        notes=notes,
        data=ladder,
    )


def _ladder_chart(rungs: Sequence[Rung]) -> Chart:
    series = []
    for style, can_run in enumerate((True, False)):
        places = [i for i, rung in enumerate(rungs) if (rung.kind in RUNNABLE) == can_run]
        rates = [rungs[i].tokens_per_s for i in places]
        series.append(Series.of("", places, rates, kind="rows", style=style))
    alt = "Rates of the rungs of the ladder with intervals; the table below holds the values."
    return Chart(alt, "tokens/s", "", series, rows=[r.label for r in rungs], width=720)
