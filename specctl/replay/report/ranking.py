"""Named values with intervals, one a line, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from specctl.replay.report.svg import CHARACTER, figure, line, mark, text, ticks
from specctl.stats import Interval

ROW, TOP, BOTTOM, RIGHT = 26, 6, 42, 24
MAX_LABEL = 44
"""Characters of a name that are drawn; the table beside holds all."""


@dataclass(frozen=True)
class Ranking:
    """Values from 0 up, one row each.

    Attributes:
        alt: what a reader who cannot see the figure is told.
        rows: name, value and style, see `chart.Series`.
    """

    alt: str
    x_label: str
    rows: Sequence[tuple[str, Interval, int]]
    width: int = 720

    def svg(self) -> str:
        """The figure as markup."""
        return ET.tostring(_draw(self), encoding="unicode")


def _draw(ranking: Ranking) -> ET.Element:
    names = [_short(name) for name, _, _ in ranking.rows]
    left = 16 + CHARACTER * max(len(name) for name in names)
    bottom = TOP + ROW * len(names)
    most = 1.05 * max(max(value.value, value.high) for _, value, _ in ranking.rows)
    scale = (ranking.width - RIGHT - left) / most
    svg = figure(ranking.alt, ranking.width, bottom + BOTTOM)
    for value in ticks(0.0, most):
        at = left + value * scale
        line(svg, (at, TOP), (at, bottom), "grid")
        text(svg, at, bottom + 18, f"{value:g}", "middle")
    text(svg, (left + ranking.width - RIGHT) / 2, bottom + 36, ranking.x_label, "middle", "label")
    for index, (name, (_, found, style)) in enumerate(zip(names, ranking.rows, strict=True)):
        middle = TOP + ROW * (index + 0.5)
        text(svg, left - 8, middle + 4, name, "end")
        ends = (left + found.low * scale, middle), (left + found.high * scale, middle)
        line(svg, *ends, f"error s{style}")
        mark(svg, left + found.value * scale, middle, style)
    return svg


def _short(name: str) -> str:
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…"
