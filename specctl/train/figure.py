"""`report.png`: where Φ lies, where it is cut, and what each bin is worth."""

from __future__ import annotations

import io
from typing import Any

from specctl.train.report import BinSide, CartReport

TRAIN, HELD_OUT = "#9db4c8", "#1f5a8a"


def report_png(report: CartReport) -> bytes:
    """A picture of the report; drawn without pyplot, hence without global state or display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    phi_axes, acceptance_axes, tcr_axes = figure.subplots(3, 1)
    _draw_histogram(phi_axes, report)
    _draw_bins(acceptance_axes, report, "mean_acceptance_length", "mean acceptance length (tokens)")
    _draw_bins(tcr_axes, report, "mean_tcr", "mean TCR (rank, 1 = best)")
    figure.suptitle(_title(report), fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _title(report: CartReport) -> str:
    config, prompts = report.config, report.prompts
    return (
        f"HeteroSpec bins: {config.method}, label {config.label}, filter {config.filter}; "
        f"base depth {config.base.depth}\n{prompts['train']} training and "
        f"{prompts['held_out']} held-out prompts, {report.rounds_by_fate['used']} rounds used"
    )


def _draw_histogram(axes: Any, report: CartReport) -> None:
    bounds, counts = report.histogram.bounds, report.histogram.counts
    axes.stairs(counts, bounds, fill=True, color=TRAIN, label="rounds (train and held out)")
    for row in report.bins[:-1]:
        label = "edges" if row.index == 0 else None
        axes.axvline(row.high, color="#b03030", linewidth=1, linestyle="--", label=label)
    axes.set_xlabel("Φ, cumulative meta-path top-K entropy (nats)")
    axes.set_ylabel("rounds")
    axes.legend(frameon=False)


def _draw_bins(axes: Any, report: CartReport, field: str, label: str) -> None:
    """Bars a bin, training beside held out, the number of rounds under each bin."""
    sides = ((-0.2, TRAIN, "train"), (0.2, HELD_OUT, "held_out"))
    for shift, colour, side in sides:
        values = [getattr(_side(row, side), field) for row in report.bins]
        places = [index + shift for index, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        axes.bar(places, heights, width=0.38, color=colour, label=side.replace("_", "-"))
    axes.set_xticks(range(len(report.bins)), [_tick(row) for row in report.bins], fontsize=8)
    axes.set_xlabel("bin: depth (levels) / tokens (root counted); held-out rounds n")
    axes.set_ylabel(label)
    axes.margins(y=0.25)
    axes.legend(frameon=False, ncols=2, loc="upper right")


def _side(row: Any, side: str) -> BinSide:
    found: BinSide = getattr(row, side)
    return found


def _tick(row: Any) -> str:
    return f"{row.index}: {row.depth}/{row.num_tokens}\nn={row.held_out.num_rounds}"
