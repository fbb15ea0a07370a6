"""What is known of a fit of AdaSD: JSON, tables, picture."""

from __future__ import annotations

import io
from typing import Any

from specctl.policy.parse import canonical_json
from specctl.policy.records import Record
from specctl.train.adasd import Signal, StopFit
from specctl.train.adasd_clip import ClipReport

ACCEPTED, REJECTED, LIMIT = "#1f5a8a", "#b03030", "#9db4c8"
STOP_COLUMNS = (
    "stop",
    "cost/token",
    "× best chain",
    "tokens/call",
    "drafted/call",
    "verified/call",
)
CLIP_COLUMNS = (
    "clip", "tokens/call", "× strict", "accuracy", "recovery", "lost", "gained", "p-value", "bound",
    "texts changed", "relaxed/100", "",
)  # fmt: skip


class AdasdReport(Record):
    """`report.json`. `clip` is None for a fit without paired runs, which is lossless."""

    stop: StopFit
    clip: ClipReport | None


def report_json(report: AdasdReport) -> bytes:
    """Canonical JSON."""
    return canonical_json(report.model_dump(mode="json")).encode()


def summary(report: AdasdReport) -> tuple[str, ...]:
    """What the tables cannot say of themselves."""
    stop, clip = report.stop, report.clip
    lines = [
        f"{stop.num_prompts['train']} training and {stop.num_prompts['held_out']} held-out prompts;"
        f" {stop.num_tokens['train']} and {stop.num_tokens['held_out']} tested tokens",
        _signal_line("draft entropy, nats", stop.entropy),
        _signal_line("Jensen-Shannon distance", stop.distance),
        f"costs in {stop.config.cost}, held out, 95 % intervals; chosen on the training prompts",
    ]
    if clip is None:
        return (*lines, "no paired runs: the acceptance stays strict, the artifact is lossless")
    contract = clip.config.contract
    return (
        *lines,
        f"clip: {clip.num_prompts} prompts, {clip.num_checked} with checkable answers; mean "
        f"{contract.kind} loss at most {contract.max_loss:g} per prompt at confidence "
        f"{contract.confidence:g}, all clips together; variant {clip.config.variant}",
        "; ".join(f"{name}: {value}" for name, value in clip.setup.items()),
    )


def _signal_line(name: str, signal: Signal) -> str:
    return (
        f"{name}: accepted {signal.accepted_mean:.3f}, rejected {signal.rejected_mean:.3f}, "
        f"AUC {signal.auc:.3f}"
    )


def stop_cells(report: AdasdReport) -> list[tuple[str, ...]]:
    """One row a way of stopping; the last one is in the artifact."""
    rows = report.stop.rows
    return [
        (
            row.name + (", chosen" if row is rows[-1] else ""),
            row.held_out_cost.text(_spec(row.train_cost)),
            row.against.text(),
            f"{row.tokens_per_call:.2f}",
            f"{row.levels_per_call:.2f}",
            f"{row.verified_per_call:.2f}",
        )
        for row in rows
    ]


def _spec(cost: float) -> str:
    """Behind the point: target steps are about 1, microseconds thousands."""
    return ".4f" if cost < 100 else ".0f"


def clip_cells(report: ClipReport) -> list[tuple[str, ...]]:
    """One row a clip, smallest first."""
    return [_clip_row(report, index) for index in range(len(report.rows))]


def _clip_row(report: ClipReport, index: int) -> tuple[str, ...]:
    row = report.rows[index]
    seen, trial = row.comparison, row.trial
    mark = "certified" if trial.certified else "refused" if trial.is_tested else "not tested"
    return (
        f"{row.clip:g}",
        f"{seen.tokens_per_call.value:.2f}",
        seen.speedup.text(),
        "-" if seen.accuracy is None else f"{seen.accuracy:.1%}",
        seen.recovery.text(".1%"),
        str(seen.lost),
        str(seen.gained),
        f"{trial.p_value:.3g}",
        f"{trial.max_certifiable:.3f}",
        f"{seen.diverged.value:.1%}",
        f"{seen.relaxed_per_100:.2f}",
        f"{mark}, chosen" if index == report.chosen else mark,
    )


def render_report(report: AdasdReport) -> Any:
    """The tables for a terminal."""
    from rich.console import Group

    tables = [_table(STOP_COLUMNS, stop_cells(report), "\n".join(summary(report)))]
    if report.clip is not None:
        tables.append(_table(CLIP_COLUMNS, clip_cells(report.clip), "acceptance"))
    return Group(*tables)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    for cells in rows:
        table.add_row(*cells)
    return table


def report_png(report: AdasdReport) -> bytes:
    """Both signals by class, and what each way of stopping costs; drawn without pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 10), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    entropy, distance, costs = figure.subplots(3, 1)
    _draw_signal(entropy, report.stop.entropy, "draft entropy (nats)")
    _draw_signal(distance, report.stop.distance, "Jensen-Shannon distance (square root of bits)")
    if report.clip is not None and report.clip.chosen is not None:
        certified = report.clip.config.clips[report.clip.chosen]
        distance.axvline(certified, color=LIMIT, linewidth=2, label="certified clip")
        distance.legend(frameon=False)
    _draw_costs(costs, report)
    figure.suptitle(
        f"AdaSD: {report.stop.num_prompts['train']} training and "
        f"{report.stop.num_prompts['held_out']} held-out prompts",
        fontsize=11,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_signal(axes: Any, signal: Signal, label: str) -> None:
    for counts, colour, name in (
        (signal.accepted, ACCEPTED, "accepted"),
        (signal.rejected, REJECTED, "first rejected"),
    ):
        shares = [count / max(1, sum(counts)) for count in counts]
        axes.stairs(shares, signal.bounds, color=colour, label=name, fill=True, alpha=0.5)
    axes.axvline(signal.midpoint, color="black", linestyle="--", linewidth=1, label="midpoint")
    axes.set_xlabel(label)
    axes.set_ylabel("share of tokens")
    axes.legend(frameon=False)


def _draw_costs(axes: Any, report: AdasdReport) -> None:
    rows = report.stop.rows
    for place, row in enumerate(rows):
        found = row.against
        colour = REJECTED if place == len(rows) - 1 else ACCEPTED
        if found.known:
            axes.plot([found.low, found.high], [place, place], color=colour)
            axes.plot([found.value], [place], "o", color=colour)
    axes.axvline(1, color=LIMIT, linewidth=2)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("held-out cost per token, × best fixed chain (the last row is chosen)")
