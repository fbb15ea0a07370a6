"""`ladder.json`: the rungs of one log at one load; its table, its sentences and its picture."""

from __future__ import annotations

import io
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from specctl.durable import write_whole
from specctl.formatting import Table, fixture_note, sampling
from specctl.records import json_bytes
from specctl.replay.facts import PLAIN, ResultRecord, TraceFacts
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
    def fastest(self) -> Rung:
        """The fastest runnable rung that the log supports and that can win."""
        runnable = [r for r in self.rungs if r.kind in RUNNABLE and not r.is_marked]
        able = [rung for rung in runnable if self.can_win(rung.label)]
        return max(able, key=lambda rung: rung.tokens_per_s.value)

    @property
    def to_run(self) -> Rung:
        """The fastest runnable rung; the best static one if the lead is within its interval; plain
        decoding if neither beats it beyond chance."""
        best, static = self.fastest, self.rung(self.best_static)
        wanted = (best, static) if best.against_static.low > 1 else (static,)
        return next((rung for rung in wanted if rung.against_plain.low > 1), self.rung(PLAIN))


# --------------------------------------------------------------------------------- shown

JSON_NAME, PICTURE_NAME = "ladder.json", "ladder.png"
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
EXPLAINED = {
    "R_feat": "R_feat: best trees,\ncalibrated features",
    "R_prob": "R_prob: best trees,\ntarget's uncertainty known",
    "R_clair": "R_clair: outcome known,\nlogged trees",
    "R_ceil": "R_ceil: every draft\ntoken accepted",
}


def write_ladder(result: LadderResult, folder: Path) -> None:
    """Writes `ladder.json` and `ladder.png`."""
    write_whole(folder / JSON_NAME, json_bytes(result.to_json()), "ladder")
    write_whole(folder / PICTURE_NAME, ladder_png(result), "ladder")


def ladder_table(result: LadderResult) -> Table:
    """One row a rung, from plain decoding to the ceiling."""
    note = fixture_note(result.target)
    title = (
        f"{result.target} + {result.drafter}, batch {result.batch_size}, "
        f"{sampling(result.sampling)}: {result.rungs[0].num_tokens} tokens of "
        f"{result.num_prompts.held_out} held-out prompts, "
        + intervals_over(result.num_prompts.held_out)
        + (f"; {note}" if note else "")
    )
    columns = ("rung", "calls", "verified", "levels", "time (s)", "τ", "tokens/s", "× static")
    wide = ("calls", "verified", "levels", "time (s)")
    rows = [_cells(result, rung) for rung in result.rungs]
    return Table(title, (*columns, "gap closed"), rows, wide=wide)


def _cells(result: LadderResult, rung: Rung) -> list[str]:
    closed = "-"
    if rung.gap_closed is not None and rung.kind not in OUTSIDE_GAP:
        below = rung.gap_closed.high < 0
        closed = "below static" if below else rung.gap_closed.text(".0%")
    mark = ("*" if rung.is_marked else "") + (" (estimate)" if rung.is_estimate else "")
    return [
        result.marked(rung.label) + mark,
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
    """Sentences on tuning, headroom, losses, estimates and marks."""
    yield (
        f"× static is relative to {result.best_static}, the faster static rung on the "
        f"{result.num_prompts.train} training prompts."
    )
    fastest = result.fastest
    gain = fastest.against_plain.text(".2f")
    yield f"On {result.clock}: {fastest.label} × {gain} of plain."
    yield from result.footnotes()
    for rung in result.rungs:
        if rung.kind not in ("plain", "policy"):
            yield f"{rung.label}: {rung.setting}."
    lead = result.split.headroom
    advice = ""
    if not lead.low > 0:
        advice = " The data do not show any, so no share of it is given."
    elif lead.high < WORTHWHILE:
        advice = f" Under {WORTHWHILE:.0%}: a better drafter is worth more than a policy."
    yield f"Headroom, R_prob over the best static rung: {lead.text('+.1%')}.{advice}"
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
    yield f"Lost tokens/s: {'; '.join(losses)}."
    fits = [
        f"{name} log-loss {q.log_loss:.4f} nats, ECE {q.calibration_error:.4f}"
        for name, q in result.calibration.items()
    ]
    known = (
        "the target's distribution at depth 1 and a cross-fitted estimate below"
        if result.is_sampled
        else "a cross-fitted estimate, since a greedy target's probability is 0 or 1"
    )
    num_nodes = result.calibration["oracle"].num_nodes
    yield f"On {num_nodes} held-out nodes: {'; '.join(fits)}. R_prob uses {known}."
    for rung in result.rungs:
        if rung.is_marked:
            yield (
                f"* {rung.label}: the log holds {rung.support:.1%} of the expansions that it "
                "needs; specctl replay gives bounds."
            )


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
        labels.append(EXPLAINED.get(rung.label, settings))
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
    note = "\na fixture pair: no claim about large models" if fixture_note(result.target) else ""
    title = (
        f"{result.target} + {result.drafter}, {sampling(result.sampling)}, "
        f"batch size {result.batch_size}; {result.num_prompts.held_out} held-out prompts, "
        f"{rungs[0].num_tokens} tokens{note}"
    )
    axes.set_title(title, fontsize=9.5, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
