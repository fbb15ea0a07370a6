"""`report.png`: the density of each level's confidence, reached and missed (ECHO, Figure 2)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from specctl.train.echo_report import NUM_BARS, Density, EchoReport, LevelReport

REACHED, MISSED, CUT = "#1f5a8a", "#c98a4b", "#b03030"
COLUMNS = 3


def report_png(report: EchoReport) -> bytes:
    """A picture of the report; drawn without pyplot, hence without global state or display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(report.levels) // COLUMNS)
    figure = Figure(figsize=(9, 1 + 2.2 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True).flatten()
    for place, (level, density) in enumerate(zip(report.levels, report.densities, strict=True)):
        _draw_level(axes[place], level, density, with_legend=place == 0)
    for spare in axes[len(report.levels) :]:
        spare.set_axis_off()
    figure.suptitle(
        f"Confidence by level, {report.rows['held_out']} positions of "
        f"{report.prompts['held_out']} held-out prompts",
        fontsize=11,
    )
    figure.supxlabel("probability of the level's likeliest path", fontsize=9)
    figure.supylabel("density", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_level(axes: Any, level: LevelReport, density: Density, *, with_legend: bool) -> None:
    edges = np.linspace(0, 1, NUM_BARS + 1)
    sides = (("reached", density.reached, REACHED), ("missed", density.missed, MISSED))
    for name, counts, colour in sides:
        total = max(1, sum(counts))
        heights = np.array(counts) * NUM_BARS / total
        axes.stairs(heights, edges, fill=True, alpha=0.5, color=colour, label=name)
    if level.threshold is not None:
        axes.axvline(level.threshold, color=CUT, linewidth=1.2, linestyle="--", label="gate")
    axes.set_title(f"level {level.level}, AUC {level.held_out_auc.text('.2f')}", fontsize=8)
    axes.tick_params(labelsize=7)
    if with_legend:
        axes.legend(frameon=False, fontsize=7)
