"""The first section: the best setting, its gains, the distance to the optimum, engine settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.formatting import count, listed
from specctl.replay.acceptance import TraceFigures
from specctl.replay.facts import PLAIN
from specctl.replay.ladder.result import RUNNABLE, LadderResult, Rung
from specctl.replay.tune.verdict import TuneResult, result_table, tune_notes
from specctl.report.charts import Chart, Series
from specctl.report.given import Given
from specctl.report.page import Figure, Section
from specctl.report.result_sections import BY_PROMPT
from specctl.stats import Interval

NOT_TUNED = (
    "The fastest of the policies was picked on the prompts that it is shown for, which flatters "
    "it. specctl tune chooses on training prompts and reports on held-out ones."
)
NOT_ELSEWHERE = "This holds for prompts like these; another workload needs its own traces."
NONE_YET = (
    "None yet. specctl tune finds one: it weighs calls against verified tokens by their time, "
    "chooses on training prompts and reports on held-out ones. Run specctl profile -o "
    "cost_model.json and specctl tune TRACES --cost-model cost_model.json -o tuned, and give "
    "--tune tuned/tune.json."
)
TIMES_PLAIN = "the speed of plain decoding"
LIMITS = {
    "oracle": "the best possible with this drafter, over plain decoding, estimated",
    "clairvoyant": "a bound for any policy: all outcomes known in advance",
}
"""Rungs above every policy, in words."""
NAMES = {
    "oracle": "best possible",
    "plain": "plain decoding",
    "chain": "best static chain",
    "tree": "best static tree",
}
"""Names of rungs on the picture; others have their label, or the first word of a long one."""
LONGEST_NAME = 16  # characters beside a point


@dataclass(frozen=True)
class Point:
    """A setting on the picture."""

    label: str
    tau: Interval
    speed: Interval  # over plain decoding's
    kind: str = "policy"  # of its rung
    marks: str = ""  # of `TraceFacts.marked`

    @property
    def name(self) -> str:
        """A short name for the picture; tables have the whole label."""
        kind = "plain" if self.label == PLAIN else self.kind
        short = self.label if len(self.label) <= LONGEST_NAME else self.label.split(":")[0]
        return NAMES.get(kind, short) + self.marks


def recommendation(given: Given, figures: TraceFigures | None) -> Section:
    """The setting to run, by the strongest evidence given."""
    if given.tune is not None:
        return _from_tune(given, given.tune)
    if given.ladder is not None:
        return _from_ladder(given, given.ladder)
    marks = []
    if figures is not None:
        of = "the policy that was logged" if figures.tree is None else figures.tree
        first = figures.depths[0].conditional_prob
        marks = [
            (figures.tau.text(".2f"), f"tokens that one call of the target emits under {of}"),
            (first.text(".0%"), "of the time the draft holds the target's next token"),
        ]
    return Section("recommendation", missing=NONE_YET, marks=marks)


def _from_tune(given: Given, tune: TuneResult) -> Section:
    chosen, objective, arrivals = tune.standing(tune.chosen), tune.objective, tune.load
    held_out, per_s = chosen.held_out, arrivals.arrival_rate_per_s
    offered = "a closed loop" if per_s is None else f"{per_s:g} requests/s"
    rate = f"tokens/s, predicted by the cost model ({objective.kind})"
    unseen = "which the choice never saw"
    if tune.scored_on_training_prompts:
        unseen = f"on some of which {listed(tune.scored_on_training_prompts)} was fitted"
    return _answer(
        given,
        [
            Point(
                p.policy,
                p.held_out.mean_acceptance_length,
                p.held_out.against_plain,
                marks=tune.marks(p.policy),
            )
            for p in tune.policies
        ],
        [
            (f"× {held_out.against_plain.text('.2f')}", TIMES_PLAIN),
            _over_static(held_out.against, tune.chosen, tune.baseline),
            (held_out.rate.text(".0f"), rate),
        ],
        reading=tune.sentence(),
        basis=f"Chosen among {count(tune.num_settings, 'setting')} on "
        f"{count(tune.num_prompts.train, 'prompt')}; n = "
        f"{count(tune.num_prompts.held_out, 'held-out prompt')}, {unseen}; "
        f"{BY_PROMPT}.",
        tables=[result_table(tune)],
        notes=[
            *tune_notes(tune),
            f"Rates are the cost model's, for {offered} at batch size {arrivals.batch_size}; other "
            "loads may want another setting.",
            NOT_ELSEWHERE,
        ],
        data=tune,
    )


def _from_ladder(given: Given, ladder: LadderResult) -> Section:
    best, run = ladder.fastest, ladder.to_run
    words = f"{best.against_static.text('.2f')} times the rate of {ladder.best_static}"
    words += ladder.provisos(best.label)
    if run.label == PLAIN:
        reading = ladder.why_plain()
    elif best.label == ladder.best_static:
        reading = f"{best.label} is the best static setting: no policy of the ladder beats it."
    elif run is best:
        reading = f"{best.label} beats the best static setting: {words}."
    else:
        reading = (
            f"{run.label} is the best static setting. {best.label} came out at {words}: no gain "
            "beyond the interval."
        )
    marks = [
        (f"× {run.against_plain.text('.2f')}", TIMES_PLAIN),
        _over_static(run.against_static, run.label, ladder.best_static),
        (run.tokens_per_s.text(".0f"), "tokens/s, predicted by the cost model"),
    ]
    return _answer(
        given,
        [],
        marks,
        reading=reading,
        basis=f"n = {count(ladder.num_prompts.held_out, 'held-out prompt')}; static settings were "
        f"tuned on {ladder.num_prompts.train:,} others; batch size {ladder.batch_size}; "
        f"{BY_PROMPT}.",
        notes=[*ladder.footnotes(), NOT_TUNED, NOT_ELSEWHERE],
    )


def _over_static(gain: Interval, chosen: str, static: str) -> tuple[str, str]:
    if chosen == static:
        return "× 1", "it is the best static setting itself"
    return f"× {gain.text('.2f')}", f"the speed of the best static setting, {static}"


# --------------------------------------------------------------------------- for every source


def _answer(
    given: Given, points: Sequence[Point], marks: Sequence[tuple[str, str]], **words: Any
) -> Section:
    """The section, with `points` and `marks` of the ladder and of a run added."""
    assert given.setting is not None
    ladder, run, shown = given.comparable_ladder, given.run, [*marks]
    if run is not None:
        place = f"when it ran on {run.facts.device}, {count(run.facts.num_prompts, 'prompt')}"
        for one in run.policies:
            of_tune = one.artifact_digest is not None and one.artifact_digest == given.artifact
            if one.paired and run.has_plain and (of_tune or one.policy == given.setting):
                own = one.num_prompts_fitted_on
                seen = f", {own:,} of them of its own fit, which flatters it" if own else ""
                speed = f"× {one.paired.speedup.text('.2f')}"
                shown.append((speed, f"{TIMES_PLAIN} {place}{seen}"))
    rungs = () if ladder is None else ladder.rungs
    beaten = None if ladder is None else ladder.beaten_estimate
    limits = [r for r in rungs if r.kind in LIMITS and not (beaten and r.is_estimate)]
    shown += [(f"× {r.against_plain.text('.2f')}", LIMITS[r.kind]) for r in limits]
    for rung in rungs:
        if beaten or rung.label != given.setting or rung.kind != "policy":
            continue
        if rung.gap_closed is not None:
            gap = "of the way from the best static setting to the best possible"
            shown.append((rung.gap_closed.text(".0%"), gap))
    if given.ladder is None:
        shown.append(("(no data supplied)", "the best possible: give --ladder ladder.json"))
    elif ladder is None:
        other = "the ladder is of other traces, times, load or prompts"
        shown.append(("(not comparable)", f"the best possible: {other}"))
    elif beaten is not None:
        shown.append(("(not known)", f"the best possible: {beaten.label} beats its estimate"))
    if ladder is not None:
        known = {point.label for point in points}
        new = [r for r in rungs if r.kind in RUNNABLE and r.label not in known]
        shapes = [(r.label, r.mean_acceptance_length, r.against_plain, r.kind) for r in new]
        points = [*points, *(Point(*shape, ladder.marks(shape[0])) for shape in shapes)]
    figure = _picture(given, points, limits)
    return Section(
        "recommendation",
        setting=given.setting,
        marks=shown,
        engines=given.engines,
        figures=[] if figure is None else [figure],
        **words,
    )


def _picture(given: Given, points: Sequence[Point], limits: Sequence[Rung]) -> Figure | None:
    """Speed over acceptance for the settings, the best one and the estimated optimum."""
    points = [p for p in points if p.tau.known and p.speed.known]
    if not points:
        return None
    best = [p for p in points if p.label == given.setting]
    others = [p for p in points if p.label != given.setting]

    def series(label: str, shown: Sequence[Point], style: int) -> Series:
        tau, names = [p.tau.value for p in shown], [p.name for p in shown]
        y = [p.speed.value for p in shown]
        return Series(label, tau, y, names=names, kind="points", style=style)

    oracle = [
        Point("an estimate", r.mean_acceptance_length, r.against_plain, r.kind)
        for r in limits
        if r.kind == "oracle" and r.against_plain.known
    ]
    level = {"kind": "level", "style": 2}
    possible = [Series.of("best possible, estimated", [0], [p.speed], **level) for p in oracle]
    drawn = [*points, *oracle]
    ends = [p.speed.value for p in drawn]
    pad = 0.08 * (max(ends) - min(ends)) or 0.1
    points_in_words = "; ".join(
        f"{p.name} ({p.label}) {p.tau.value:.2f}, × {p.speed.value:.2f}" for p in drawn
    )
    caption = "Higher is faster, further right accepts more."
    if given.tune is not None:
        caption += " The best setting was chosen on training prompts; shown are held-out ones."
    chart = Chart(
        f"Scatter of tokens per call and speed over plain decoding: {points_in_words}.",
        "tokens per call of the target",
        "speed, × plain decoding",
        [series("settings", others, 0), series("the best setting", best, 1), *possible],
        y_range=(min(ends) - pad, max(ends) + pad),
        height=360,
    )
    return Figure(caption, chart)
