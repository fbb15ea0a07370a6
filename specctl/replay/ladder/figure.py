"""`ladder.png`: tokens/s of every rung, from plain decoding to what is possible."""

from __future__ import annotations

import io
from typing import Any

from specctl.replay.ladder.result import LadderResult
from specctl.replay.ladder.rungs import Kind, Rung
from specctl.replay.ladder.show import BEYOND

LOOKS: dict[Kind, tuple[str, str, str]] = {
    "plain": ("#7f7f7f", "", "plain decoding"),
    "chain": ("#0072b2", "", "tuned static"),
    "tree": ("#0072b2", "", "tuned static"),
    "policy": ("#d55e00", "", "policies"),
    "features": ("#009e73", "//", "estimated limits"),
    "oracle": ("#009e73", "//", "estimated limits"),
    "clairvoyant": ("#cfcfcf", "", "exact bounds"),
    "ceiling": ("#cfcfcf", "", "exact bounds"),
}
"""Colour (Okabe and Ito's, told apart without colour vision), hatch and legend of each kind."""
EXPLAINED = {
    "R_feat": "R_feat: best trees,\ncalibrated features",
    "R_prob": "R_prob: best trees,\ntarget's uncertainty known",
    "R_clair": "R_clair: outcome known,\nlogged trees",
    "R_ceil": "R_ceil: every draft\ntoken accepted",
}


def ladder_png(result: LadderResult) -> bytes:
    """A picture that explains itself; drawn without pyplot, hence without global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rungs = result.ladder.rungs
    figure = Figure(figsize=(9.5, 1.8 + 0.55 * len(rungs)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, rung in enumerate(rungs):
        _draw_rung(axes, place, rung)
    _draw_scale(axes, rungs, result.ladder.rung(result.ladder.best_static))
    axes.set_title(_title(result), fontsize=9.5, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_rung(axes: Any, place: int, rung: Rung) -> None:
    """A bar, its interval, and the figure in words."""
    colour, hatch, _ = LOOKS[rung.kind]
    rate = rung.tokens_per_s
    axes.barh(place, rate.value, 0.66, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    spread = [[max(0, rate.value - rate.low)], [max(0, rate.high - rate.value)]]
    axes.errorbar(rate.value, place, xerr=spread, color="#222222", capsize=3, linewidth=1.2)
    share = None if rung.kind in BEYOND else rung.gap_closed
    closed = "" if share is None or share.value < 0 else f", gap closed {share.value:.0%}"
    text = f"  {rate.value:.0f}  ({rung.against_static.value:.2f}× static{closed})"
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.annotate(text, (rate.high, place), va="center", fontsize=8.5, bbox=paper)


def _draw_scale(axes: Any, rungs: tuple[Rung, ...], static: Rung) -> None:
    from matplotlib.patches import Patch

    rate, label = static.tokens_per_s.value, "best static rung"
    line = axes.axvline(rate, color="#0072b2", linestyle="--", linewidth=1, label=label, zorder=0)
    labels = [EXPLAINED.get(rung.label, _wrapped(rung.label)) for rung in rungs]
    axes.set_yticks(range(len(rungs)), labels, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(rung.tokens_per_s.high for rung in rungs))
    axes.set_xlabel("tokens per second under the cost model (whiskers: 95% interval by prompt)")
    axes.spines[["top", "right"]].set_visible(False)
    shown = {LOOKS[rung.kind][2]: LOOKS[rung.kind] for rung in rungs}
    patches: list[Any] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=text)
        for text, (colour, hatch, _) in shown.items()
    ]
    axes.figure.legend(
        handles=[*patches, line], frameon=False, fontsize=8.5, ncols=6, loc="outside lower center"
    )


def _wrapped(label: str) -> str:
    """Long settings on two lines."""
    name, _, settings = label.partition(":")
    return f"{name}\n{settings}" if len(label) > 24 and settings else label


def _title(result: LadderResult) -> str:
    facts, ladder = result.facts, result.ladder
    law = facts["sampling"]["temperature"]
    fixture = str(facts["target"]).startswith("embedded")
    note = "\na fixture pair: no claim about large models" if fixture else ""
    return (
        f"{facts['target']} + {facts['drafter']}, {f'temperature {law}' if law else 'greedy'}, "
        f"batch size {ladder.batch_size}; {ladder.num_prompts['held_out']} held-out prompts, "
        f"{ladder.rungs[0].num_tokens} tokens{note}"
    )
