"""`ladder.json`: the rungs of one log at one load; its table, its sentences and its picture."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

from pydantic import Field

from specctl.durable import write_whole
from specctl.formatting import (
    NOTHING,
    Detail,
    Table,
    count,
    is_fixture,
    listed,
    pair_title,
    sampling,
)
from specctl.records import json_bytes
from specctl.replay.facts import MARKED_BELOW, PLAIN, ResultRecord, TraceFacts, why_plain
from specctl.replay.ladder.estimates import ProbabilityQuality
from specctl.stats import Interval, intervals_over

RungKind = Literal[
    "plain", "chain", "tree", "policy", "features", "oracle", "clairvoyant", "ceiling"
]
RUNNABLE: tuple[RungKind, ...] = ("plain", "chain", "tree", "policy")
"""Rungs that can be run; the others are limits."""


class Rung(ResultRecord):
    """A rung of the ladder; all rungs are measured on the same resamples of prompts."""

    kind: RungKind
    label: str  # unique
    setting: str  # tuned settings, in words
    num_tokens: int
    calls: int
    verified_tokens: int
    num_accepted: int
    drafted_levels: int
    time_us: float  # machine time of all requests, see `LoadClock`
    # tokens_per_s, mean_acceptance_length: pooled, sums over sums
    tokens_per_s: Interval
    mean_acceptance_length: Interval
    against_static: Interval  # tokens/s over those of the best static rung
    against_plain: Interval  # over those of plain decoding
    # (R - R_static) / (R_prob - R_static); None unless the interval of R_prob - R_static is above 0
    gap_closed: Interval | None
    policy_regret: Interval | None  # R_feat - R, tokens/s; None of a limit
    support: float  # share of the wanted expansions and rounds in the log
    is_marked: bool
    is_estimate: bool  # a fitted model's, so no bound


class LossSplit(ResultRecord):
    """The loss between the clairvoyant and the best static rung, tokens/s."""

    irreducible: Interval  # R_clair - R_prob: chance in the outcome
    drafter: Interval  # R_prob - R_feat: known to the target, not to the drafter's features
    headroom: Interval  # R_prob / R_static - 1, a share: the largest gain of any policy


class SideSizes(ResultRecord):
    """Prompts on each side of a split."""

    train: int
    held_out: int


class Ladder(ResultRecord):
    """All rungs of one log at one load."""

    rungs: tuple[Rung, ...] = Field(min_length=1)  # from plain decoding to the ceiling
    best_static: str  # label of the faster static rung
    split: LossSplit
    calibration: dict[str, ProbabilityQuality]  # by estimate, on held-out prompts
    oracle_features: tuple[str, ...]  # used by the estimate of R_prob
    num_prompts: SideSizes
    batch_size: int
    is_sampled: bool  # sampled texts, so R_prob uses the target's distribution at depth 1
    config: dict[str, Any]

    def rung(self, label: str) -> Rung:
        return next(rung for rung in self.rungs if rung.label == label)


class LadderResult(Ladder, TraceFacts):
    """`ladder.json`."""

    kind: Literal["ladder"]

    @property
    def supported(self) -> list[Rung]:
        """The runnable rungs that the log supports."""
        return [r for r in self.rungs if r.kind in RUNNABLE and not r.is_marked]

    @property
    def fastest(self) -> Rung:
        """The fastest runnable rung that the log supports and that can win."""
        able = [rung for rung in self.supported if self.can_win(rung.label)]
        return max(able, key=lambda rung: rung.tokens_per_s.value)

    @property
    def to_run(self) -> Rung:
        """The fastest runnable rung; the best static one if the lead is within its interval; plain
        decoding if neither beats it beyond chance."""
        best, static = self.fastest, self.rung(self.best_static)
        wanted = (best, static) if best.against_static.low > 1 else (static,)
        return next((rung for rung in wanted if rung.against_plain.low > 1), self.rung(PLAIN))

    def why_plain(self) -> str:
        """The reason for plain decoding, where it is to be run."""
        best = self.fastest if self.fastest.label != PLAIN else self.rung(self.best_static)
        gains = [rung.against_plain for rung in self.supported if rung.label != PLAIN]
        return why_plain(best.label, best.against_plain, gains, self.time_error)

    @property
    def beaten_estimate(self) -> Rung | None:
        """The fastest runnable rung where it is faster than R_prob, which then is no limit."""
        [oracle] = (rung for rung in self.rungs if rung.kind == "oracle")
        best = max(self.supported, key=lambda rung: rung.tokens_per_s.value)
        return best if best.tokens_per_s.value > oracle.tokens_per_s.value else None


# --------------------------------------------------------------------------------- shown

JSON_NAME, PICTURE_NAME = "ladder.json", "ladder.png"
EXPLAINED = {
    "R_feat": "the best trees by the drafter's own features (an estimate)",
    "R_prob": "the best trees by the target's uncertainty (an estimate)",
    "R_clair": "the best trees with the accepted path known (a bound)",
    "R_ceil": "every draft token accepted (a bound)",
}
"""Rungs that no policy reaches, in words."""
OUTSIDE_GAP = ("plain", "clairvoyant", "ceiling")
"""Rungs below or above the gap, without a share of it."""
WORTHWHILE = 0.03
"""Least headroom that is worth the tuning of policies."""
LOOKS: dict[RungKind, tuple[str, str, str]] = {
    "plain": ("#7f7f7f", "", "plain decoding"),
    "chain": ("#0072b2", "", "tuned static"),
    "tree": ("#0072b2", "", "tuned static"),
    "policy": ("#d55e00", "", "policies"),
    "features": ("#009e73", "//", "estimated limits"),
    "oracle": ("#009e73", "//", "estimated limits"),
    "clairvoyant": ("#cfcfcf", "", "exact bounds"),
    "ceiling": ("#cfcfcf", "", "exact bounds"),
}
"""Colour (Okabe and Ito's, distinct without colour vision), hatch and legend of each kind."""


def write_ladder(result: LadderResult, folder: Path) -> None:
    """Writes `ladder.json` and `ladder.png`."""
    write_whole(folder / JSON_NAME, json_bytes(result.to_json()), "ladder")
    write_whole(folder / PICTURE_NAME, ladder_png(result), "ladder")


def ladder_parts(result: LadderResult) -> list[Any]:
    """The result for a terminal, the verdict first."""
    return [ladder_verdict(result), ladder_table(result), *ladder_notes(result)]


def ladder_verdict(result: LadderResult) -> str:
    """The fastest setting that can be run, and the most that any policy could add to it."""
    run, headroom = result.to_run, result.split.headroom
    if run.label == PLAIN:
        return f"Plain decoding is kept. {result.why_plain()}"
    gain = f", × {run.against_plain.text('.2f')} of plain decoding{result.provisos(run.label)}"
    if not headroom.low > 0 or result.beaten_estimate is not None:
        return f"Best: {run.label}{gain}; no headroom shown."
    return f"Best: {run.label}{gain}; headroom {headroom.text('+.1%')}."


def ladder_table(result: LadderResult) -> Table:
    """One row a rung, from plain decoding to the ceiling."""
    num_held_out = result.num_prompts.held_out
    title = (
        f"{pair_title(result.target, result.drafter)}\n"
        f"batch size {result.batch_size}, {sampling(result.sampling)}; "
        f"{num_held_out} held-out prompts, {intervals_over(num_held_out)}"
    )
    columns = ("rung", "calls", "verified", "levels", "time (s)", "τ", "tokens/s", "× static")
    wide = ("calls", "verified", "levels", "time (s)")
    rows = [_cells(result, rung) for rung in result.rungs]
    table = Table(title, (*columns, "gap closed"), rows, wide=wide)
    if all(row[-1] == NOTHING for row in rows):
        return replace(table, columns=columns, rows=[row[:-1] for row in rows])
    return table


def _cells(result: LadderResult, rung: Rung) -> list[str]:
    closed = NOTHING
    if rung.gap_closed is not None and rung.kind not in OUTSIDE_GAP:
        below = rung.gap_closed.high < 0
        closed = "below static" if below else rung.gap_closed.text(".0%")
    return [
        result.marked(rung.label) + "*" * rung.is_marked,
        str(rung.calls),
        str(rung.verified_tokens),
        str(rung.drafted_levels),
        f"{rung.time_us / 1e6:.2f}",
        f"{rung.mean_acceptance_length.value:.2f}",
        rung.tokens_per_s.text(".0f"),
        rung.against_static.text(".2f"),
        closed,
    ]


def ladder_notes(result: LadderResult) -> Iterator[str]:
    """Sentences on the rungs, the clock, headroom and marks; losses and estimates as details."""
    for label, words in EXPLAINED.items():
        yield f"{label}: {words}"
    yield (
        f"× static: of {result.best_static}, the fastest fixed setting on "
        f"{count(result.num_prompts.train, 'other prompt')}."
    )
    lead = result.split.headroom
    advice = f"{lead.text('+.1%')}, not clear of 0, so no share of it is given."
    if (best := result.beaten_estimate) is not None:
        advice = f"not known, as {best.label} is faster than the estimate of R_prob."
    elif lead.low > 0:
        advice = f"{lead.text('+.1%')}."
        if lead.high < WORTHWHILE:
            advice += " A better drafter is worth more than a policy."
    yield f"Headroom, R_prob over the best static setting: {advice}"
    yield f"Times: {result.clock}."
    yield from result.footnotes()
    if marked := [rung.label for rung in result.rungs if rung.is_marked]:
        yield (
            f"* the log lacks over {1 - MARKED_BELOW:.0%} of the expansions of {listed(marked)}; "
            "specctl replay gives bounds."
        )
    regrets = [
        f"policy regret of {rung.label} {rung.policy_regret.text('.0f')}"
        for rung in result.rungs
        if rung.policy_regret is not None and rung.kind != "plain"
    ]
    losses = [
        f"irreducible {result.split.irreducible.text('.0f')}",
        f"drafter {result.split.drafter.text('.0f')}",
        *regrets,
    ]
    yield Detail(f"Lost tokens/s: {'; '.join(losses)}.")


def ladder_png(result: LadderResult) -> bytes:
    """tokens/s of every rung as a picture, drawn without global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rungs, best_static = result.rungs, result.rung(result.best_static).tokens_per_s.value
    figure = Figure(figsize=(9.5, 1.8 + 0.55 * len(rungs)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    ends = []
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    labels = []
    for place, rung in enumerate(rungs):
        (colour, hatch, _), rate = LOOKS[rung.kind], rung.tokens_per_s
        axes.barh(place, rate.value, 0.66, color=colour, hatch=hatch, edgecolor="white", lw=0)
        low, high = (x if isfinite(x) else rate.value for x in (rate.low, rate.high))
        ends.append(high)
        spread = [[max(0, rate.value - low)], [max(0, high - rate.value)]]
        axes.errorbar(rate.value, place, xerr=spread, color="#222222", capsize=3, linewidth=1.2)
        share = None if rung.kind in OUTSIDE_GAP else rung.gap_closed
        closed = "" if share is None or share.value < 0 else f", gap closed {share.value:.0%}"
        text = f"  {rate.value:.0f}  ({rung.against_static.value:.2f}× static{closed})"
        axes.annotate(text, (high, place), va="center", fontsize=8.5, bbox=paper)
        # Long settings stand on two lines.
        settings = rung.label.replace(":", "\n", 1) if len(rung.label) > 24 else rung.label
        if rung.label in EXPLAINED:
            settings = fill(f"{rung.label}: {EXPLAINED[rung.label]}", 28)
        labels.append(settings)
    dashed = {"color": LOOKS["tree"][0], "linestyle": "--", "linewidth": 1, "zorder": 0}
    line = axes.axvline(best_static, label="best static rung", **dashed)
    axes.set_yticks(range(len(rungs)), labels, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(ends))
    axes.set_xlabel("tokens per second under the cost model (whiskers: 95% interval by prompt)")
    axes.spines[["top", "right"]].set_visible(False)
    shown = {LOOKS[rung.kind][2]: LOOKS[rung.kind] for rung in rungs}
    patches: list[Any] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=text)
        for text, (colour, hatch, _) in shown.items()
    ]
    figure.legend(
        handles=[*patches, line], frameon=False, fontsize=8.5, ncols=6, loc="outside lower center"
    )
    note = "\na fixture pair: no claim about large models" if is_fixture(result.target) else ""
    title = (
        f"{result.target} + {result.drafter}, {sampling(result.sampling)}, "
        f"batch size {result.batch_size}; {result.num_prompts.held_out} held-out prompts, "
        f"{rungs[0].num_tokens} tokens{note}"
    )
    axes.set_title(title, fontsize=9.5, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
