"""`report.png`: what thresholds keep, against the plain one; whether scores are probabilities."""

from __future__ import annotations

import io
from typing import Any

from specctl.train.c2t_report import C2TReport
from specctl.train.curves import CurvePoint

OWN, JOINT, CHOSEN = "#1f5a8a", "#b07030", "#b03030"
SHOWN_DEPTHS = (1, 2, 4, 8)
"""Depths whose reliability is drawn; more lines would cover each other."""


def report_png(report: C2TReport, name: str) -> bytes:
    """A picture of the report; drawn without pyplot, hence without global state or display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 11), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    curve_axes, reliability_axes, error_axes = figure.subplots(3, 1)
    _draw_curves(curve_axes, report)
    _draw_reliability(reliability_axes, report)
    _draw_errors(error_axes, report)
    figure.suptitle(f"{name}: {_title(report)}", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _title(report: C2TReport) -> str:
    nodes, held_out = report.config.nodes, report.sides["held_out"]
    return (
        f"{nodes.predicts} acceptance from {', '.join(nodes.features)}\n"
        f"{held_out.num_prompts} held-out prompts, {held_out.num_positions} positions"
    )


def _draw_curves(axes: Any, report: C2TReport) -> None:
    """Recall against positive rate, the paper's selection rule."""
    for points, colour, label in (
        (report.curve, OWN, "this scorer"),
        (report.joint_curve, JOINT, "joint probability"),
    ):
        axes.plot(*_xy(points), color=colour, label=label)
    axes.plot(
        *_xy((report.held_out,)), "o", color=CHOSEN, label=f"beta = {report.beta:.3g} (chosen)"
    )
    axes.set_xscale("log")
    axes.set_xlabel("positive rate (nodes kept of the unpruned tree)")
    axes.set_ylabel("recall (accepted tokens kept)")
    axes.legend(frameon=False)


def _xy(points: tuple[CurvePoint, ...]) -> tuple[list[float], list[float]]:
    return [point.positive_rate for point in points], [point.recall for point in points]


def _draw_reliability(axes: Any, report: C2TReport) -> None:
    axes.plot((0, 1), (0, 1), color="#888888", linewidth=1, linestyle="--")
    for level in report.calibration:
        if level.depth in SHOWN_DEPTHS:
            places = [row.mean_prob for row in level.bins]
            shares = [row.accepted_frac for row in level.bins]
            axes.plot(places, shares, marker=".", label=f"depth {level.depth}")
    axes.set_xlabel("score (mean of an equal-mass bin)")
    axes.set_ylabel("share accepted")
    axes.legend(frameon=False)


def _draw_errors(axes: Any, report: C2TReport) -> None:
    levels = [level for level in report.calibration if level.depth is not None]
    axes.bar([level.depth for level in levels], [level.ece for level in levels], color=OWN)
    axes.set_xlabel("depth (levels)")
    axes.set_ylabel("ECE (equal mass, debiased)")
