"""Charts of two axes as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

from specctl.replay.report.svg import CHARACTER, figure, line, mark, polygon, rect, text, ticks

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 44
NAME_ROW = 14
LEGEND_ROW = 18


@dataclass(frozen=True)
class Series:
    """Points with an optional interval.

    Attributes:
        x, y: equally long; points that are not finite are left out.
        low, high: of y. names: written beside the points.
        kind: `line`, with a band for the interval; `points`, with error bars; `area`, filled down
            to 0; `bars`, one unit of x wide.
        style: 0 to 6, the colour, dash and mark.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    names: Sequence[str] | None = None
    kind: Literal["line", "points", "area", "bars"] = "line"
    style: int = 0


@dataclass(frozen=True)
class Chart:
    """Two axes and what stands between them.

    Attributes:
        alt: what a reader who cannot see the figure is told.
        x_range, y_range: ends of the axes; from the data, with 0 in y, by default.
        whole_x: x counts something: ticks at whole numbers only.
    """

    alt: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    whole_x: bool = False
    width: int = 640
    height: int = 320

    def svg(self) -> str:
        """The figure as markup."""
        return ET.tostring(_draw(self), encoding="unicode")


@dataclass(frozen=True)
class _Frame:
    """Where the data go; what is beyond the ends of y is drawn at the end."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int
    height: int
    top: int

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(LEFT + (value - low) / (high - low) * (self.width - LEFT - RIGHT), 2)

    def y(self, value: float) -> float:
        low, high = self.y_range
        inside = min(max((value - low) / (high - low), 0.0), 1.0)
        return round(self.height - BOTTOM - inside * (self.height - BOTTOM - self.top), 2)


def _draw(chart: Chart) -> ET.Element:
    rows = _legend_rows(chart)
    frame = _frame(chart, TOP + LEGEND_ROW * len(rows))
    svg = figure(chart.alt, chart.width, chart.height)
    _draw_axes(svg, chart, frame)
    for series in chart.series:
        _DRAW[series.kind](svg, frame, series)
    _draw_legend(svg, rows)
    return svg


def _frame(chart: Chart, top: int) -> _Frame:
    x_range = chart.x_range or _range([x for s in chart.series for x in s.x], zero=False)
    ys = [
        y for s in chart.series for part in (s.y, s.low, s.high) if part is not None for y in part
    ]
    y_range = chart.y_range or _range(ys, zero=True)
    return _Frame(x_range, y_range, chart.width, chart.height, top)


def _range(values: Sequence[float], *, zero: bool) -> tuple[float, float]:
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low = min(low, 0.0) if zero else low
    space = (high - low) * 0.05 or 0.5
    return (low, high + space) if zero else (low - space, high + space)


def _draw_axes(svg: ET.Element, chart: Chart, frame: _Frame) -> None:
    bottom, right = frame.height - BOTTOM, frame.width - RIGHT
    for value in ticks(*frame.y_range, num=5):
        at = frame.y(value)
        line(svg, (LEFT, at), (right, at), "grid")
        text(svg, LEFT - 8, at + 4, f"{value:g}", "end")
    for value in ticks(*frame.x_range, num=8, whole=chart.whole_x):
        line(svg, (frame.x(value), bottom), (frame.x(value), bottom + 4), "axis")
        text(svg, frame.x(value), bottom + 18, f"{value:g}", "middle")
    line(svg, (LEFT, bottom), (right, bottom), "axis")
    text(svg, (LEFT + right) / 2, frame.height - 8, chart.x_label, "middle", "label")
    middle = (frame.top + bottom) / 2
    label = text(svg, 14, middle, chart.y_label, "middle", "label")
    label.set("transform", f"rotate(-90 14 {middle:g})")


def _legend_rows(chart: Chart) -> list[list[tuple[float, Series]]]:
    """Series with a label and where each entry starts, px, wrapped to the width."""
    rows: list[list[tuple[float, Series]]] = []
    at = math.inf
    for series in chart.series:
        size = 40 + CHARACTER * len(series.label)
        if not series.label:
            continue
        if at + size > chart.width - RIGHT:
            rows.append([])
            at = float(LEFT)
        rows[-1].append((at, series))
        at += size
    return rows


def _draw_legend(svg: ET.Element, rows: list[list[tuple[float, Series]]]) -> None:
    for index, row in enumerate(rows):
        middle = TOP + LEGEND_ROW * index
        for at, series in row:
            if series.kind in ("area", "bars"):
                rect(svg, at, middle - 5, 20, 10, f"fill s{series.style}")
            else:
                if series.kind == "line":
                    line(svg, (at, middle), (at + 20, middle), f"line s{series.style}")
                mark(svg, at + 10, middle, series.style)
            text(svg, at + 26, middle + 4, series.label, "start")


def _known(series: Series) -> Iterator[tuple[int, float, float]]:
    for index, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        if math.isfinite(x) and math.isfinite(y):
            yield index, x, y


def _interval(series: Series, index: int) -> tuple[float, float] | None:
    if series.low is None or series.high is None:
        return None
    low, high = series.low[index], series.high[index]
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _draw_line(svg: ET.Element, frame: _Frame, series: Series) -> None:
    points = list(_known(series))
    spans = [(x, span) for i, x, _ in points if (span := _interval(series, i))]
    upper = [(frame.x(x), frame.y(span[1])) for x, span in spans]
    lower = [(frame.x(x), frame.y(span[0])) for x, span in reversed(spans)]
    if upper:
        polygon(svg, [*upper, *lower], f"band s{series.style}")
    places = [(frame.x(x), frame.y(y)) for _, x, y in points]
    joined = " ".join(f"{x:g},{y:g}" for x, y in places)
    ET.SubElement(svg, "polyline", {"points": joined, "class": f"line s{series.style}"})
    for x, y in places:
        mark(svg, x, y, series.style)


def _draw_points(svg: ET.Element, frame: _Frame, series: Series) -> None:
    names: list[tuple[float, float, str]] = []
    for index, x, y in _known(series):
        at, up = frame.x(x), frame.y(y)
        if span := _interval(series, index):
            line(svg, (at, frame.y(span[0])), (at, frame.y(span[1])), f"error s{series.style}")
        mark(svg, at, up, series.style)
        if series.names is not None:
            names.append((up, at, series.names[index]))
    below = -math.inf
    for up, at, name in sorted(names):  # names of points that all but coincide stand in rows
        below = max(up, below + NAME_ROW)
        _draw_name(svg, frame, at, below, name)


def _draw_name(svg: ET.Element, frame: _Frame, x: float, y: float, name: str) -> None:
    fits = x + 9 + CHARACTER * len(name) < frame.width
    text(svg, x + 9 if fits else x - 9, y + 4, name, "start" if fits else "end", "name")


def _draw_area(svg: ET.Element, frame: _Frame, series: Series) -> None:
    places = [(frame.x(x), frame.y(y)) for _, x, y in _known(series)]
    if places:
        floor = frame.y(0)
        ends = [(places[-1][0], floor), (places[0][0], floor)]
        polygon(svg, [*places, *ends], f"fill s{series.style}")


def _draw_bars(svg: ET.Element, frame: _Frame, series: Series) -> None:
    for _, x, y in _known(series):
        left, right, top = frame.x(x - 0.4), frame.x(x + 0.4), frame.y(y)
        rect(svg, left, top, right - left, frame.y(0) - top, f"fill s{series.style}")


_DRAW = {"line": _draw_line, "points": _draw_points, "area": _draw_area, "bars": _draw_bars}
