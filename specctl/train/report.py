"""What is known of a fit, as JSON, as an artifact's card, on a terminal and as a picture."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import JsonValue

from specctl.artifacts import Evidence, Metric, PairFingerprint, SplitSize
from specctl.artifacts import card as cards
from specctl.formatting import terminal_table
from specctl.policy import Policy
from specctl.records import Record, canonical_json
from specctl.stats import Interval

Data = TypeVar("Data", bound=Record)
Draw = Callable[[Any], None]
"""Draws into the axes of matplotlib."""
BLUE, PALE, RED, AMBER = "#1f5a8a", "#9db4c8", "#b03030", "#b07030"
PANEL_INCHES, MOST_IN_A_COLUMN = 3.2, 3


@dataclass(frozen=True)
class Table:
    """Cells as text; the legend says what short column heads mean."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str = ""


@dataclass(frozen=True)
class FitReport(Generic[Data]):
    """Everything that is known of a fit.

    Attributes:
        kind: of the fit, such as `cart`. title: of the card and the picture.
        what: the policy in a sentence or two, Markdown.
        config: settings of the fit, as the manifest states them.
        data: the figures; `report.json` is this record.
        splits: prompts, and rounds or positions, of each side; intervals are over the last side.
        metrics: the manifest's figures; a `Metric` says itself how many prompts it is over.
        summary: lines that go with the tables.
        limits: what the figures do not say.
        promise: what a lossy policy is certified for, else empty.
        twin: how another runtime evaluates the ONNX twin. use: commands beside the usual ones.
    """

    kind: str
    title: str
    what: str
    config: Mapping[str, JsonValue]
    data: Data
    splits: Mapping[str, tuple[int, int]]
    metrics: Mapping[str, Metric | Interval | float | None]
    summary: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[Draw]
    limits: Sequence[str]
    promise: str = ""
    twin: str = ""
    use: Sequence[str] = ()

    def json_bytes(self) -> bytes:
        """`report.json`: canonical JSON."""
        return canonical_json(self.data.model_dump(mode="json")).encode()

    def evidence(self, trace_digest: str) -> Evidence:
        """The manifest's statement of the data and of the figures."""
        num_prompts = [*self.splits.values()][-1][0]

        def metric(found: Metric | Interval | float | None) -> Metric:
            if isinstance(found, Metric):
                return found
            if isinstance(found, Interval):
                return Metric.of(found.value, found.low, found.high, num_prompts=num_prompts)
            return Metric.of(found, None, None)

        splits = {
            side: SplitSize(num_prompts=prompts, num_rounds=rounds)
            for side, (prompts, rounds) in self.splits.items()
        }
        metrics = {name: metric(found) for name, found in self.metrics.items()}
        return Evidence.of_splits(trace_digest, splits, metrics)

    def card(self, policy: Policy, pair: PairFingerprint, trace_digest: str) -> str:
        """`README.md` of the artifact; a pure function of its arguments."""
        lines = map(cards.cell, self.summary)
        use = cards.use_block(pair, *self.use, lossless=policy.lossless)
        limits = "\n".join(f"- {line}" for line in self.limits)
        sections = (
            cards.head(self.title, self.what, policy, pair),
            *([self.promise] if self.promise else []),
            "## Evidence\n\n" + cards.bullets(f"traces `{trace_digest}`", *lines),
            *(_markdown(table) for table in self.tables),
            f"## Use\n\n{use} {self.twin}".rstrip(),
            f"## Limits\n\n{limits}\n{cards.FIXTURE_LINE}",
        )
        return "\n\n".join(sections) + "\n"

    def terminal(self) -> Any:
        """A rich renderable."""
        from rich.console import Group

        parts: list[Any] = []
        for table in self.tables:
            parts.append(terminal_table(None, table.columns, table.rows))
            parts += [table.legend] if table.legend else []
        return Group(*parts, *self.summary)

    def png(self) -> bytes:
        """A picture; drawn without pyplot, hence without global state or display."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = 1 if len(self.figures) <= MOST_IN_A_COLUMN else MOST_IN_A_COLUMN
        rows = -(-len(self.figures) // columns)
        size = (8 if columns == 1 else 11, 0.8 + PANEL_INCHES * rows)
        figure = Figure(figsize=size, dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for place, draw in zip(axes, self.figures, strict=False):
            draw(place)
            if place.get_legend_handles_labels()[0]:
                place.legend(frameon=False)
        for spare in axes[len(self.figures) :]:
            spare.set_axis_off()
        sizes = ", ".join(f"{p} {side} prompts" for side, (p, _) in self.splits.items())
        figure.suptitle(f"{self.title}: {sizes}".replace("_", "-"), fontsize=11)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def _markdown(table: Table) -> str:
    rows = [[cards.cell(text) for text in row] for row in table.rows]
    legend = f"\n\n{table.legend}." if table.legend else ""
    return f"## {table.title}\n\n{cards.table(table.columns, rows)}{legend}"


def draw_intervals(axes: Any, found: Sequence[Interval], label: str) -> None:
    """Figures with their intervals, side by side; what is not known is left out."""
    for place, one in enumerate(found):
        if one.known:
            axes.plot([place, place], [one.low, one.high], color=BLUE, linewidth=1.5)
            axes.plot([place], [one.value], "o", color=BLUE)
    axes.axhline(1, color=PALE, linewidth=2, label="strict")
    axes.set_ylabel(label)
