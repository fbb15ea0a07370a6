"""Charts as inline SVG: drawn by matplotlib, coloured by the style sheet of the page.

Every colour becomes a variable of the style sheet, so a chart follows the light and the dark theme
and paper. Styles also differ by dash or mark, not by colour alone. No inline style is left: the
content security policy of the page would block it.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specctl.stats import Interval

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 44
"""Margins around the axes, px."""
ROW, NAME_ROW, LEGEND_ROW = 26, 14, 18
CHARACTER = 7.2
"""Width of a character at 12 px: enough to place labels."""
MAX_LABEL = 44
"""Characters of a row's name that are drawn; the table beside holds all."""
BACKGROUND = 6
"""The style of points that others stand out from."""
MARKS = ("o", "s", "D", "^", "o", "s", "o")
DASHES: tuple[Any, ...] = ("-", (0, (7, 4)), (0, (2, 3)), (0, (9, 3, 2, 3)), "-", (0, (5, 2)), "-")
COLOURS = {"grid": "#0000b0", "soft": "#0000b1", "paper": "#0000b2"} | {
    f"s{style}": f"#0000a{style}" for style in range(7)
}
"""Stand-ins, each replaced by the variable of its name."""


@dataclass(frozen=True)
class Series:
    """Points with an optional interval.

    Attributes:
        x, y: equally long; points that are not finite are left out.
        low, high: of y. names: written beside the points.
        kind: `line`, with a band for the interval; `points`, with error bars; `area`, filled down
            to 0; `bars`, one unit of x wide; `rows`, points with error bars along a horizontal
            axis, x the number of the row.
        style: 0 to 6, the colour, dash and mark.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    names: Sequence[str] | None = None
    kind: Literal["line", "points", "area", "bars", "rows"] = "line"
    style: int = 0

    @classmethod
    def of(cls, label: str, x: Sequence[float], values: Sequence[Interval], **looks: Any) -> Series:
        """Intervals over x."""
        y, low, high = ([getattr(value, n) for value in values] for n in ("value", "low", "high"))
        return cls(label, x, y, low, high, **looks)


@dataclass(frozen=True)
class Chart:
    """Two axes and series between them.

    Attributes:
        alt: the figure in words, for readers who cannot see it.
        x_range, y_range: ends of the axes; from the data, with 0 in y, by default.
        whole_x: x counts something: ticks at whole numbers only.
        rows: names of the rows, for series of that kind; `x_label` is then that of the values.
    """

    alt: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    whole_x: bool = False
    rows: Sequence[str] = ()
    width: int = 640
    height: int = 320

    def svg(self) -> str:
        """The chart as markup, every text in it escaped."""
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "specctl"})
            mpl.rcParams.update({"text.parse_math": False, "font.size": 12})
            height = TOP + ROW * len(self.rows) + BOTTOM if self.rows else self.height
            figure = Figure(figsize=(self.width / 72, height / 72), dpi=72)
            FigureCanvasSVG(figure)
            self._draw(figure, height)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return _inline(buffer.getvalue(), self.alt, self.width, height)

    def _draw(self, figure: Any, height: int) -> None:
        from matplotlib.ticker import MaxNLocator

        shown = [series for series in self.series if series.label]
        widest = max((40 + CHARACTER * len(series.label) for series in shown), default=1.0)
        columns = max(1, min(len(shown), int((self.width - LEFT) / widest)))
        names = [r if len(r) <= MAX_LABEL else f"{r[: MAX_LABEL - 1]}…" for r in self.rows]
        left = 16 + CHARACTER * max(map(len, names)) if names else LEFT
        top = TOP + LEGEND_ROW * math.ceil(len(shown) / columns)
        sides = (left / self.width, BOTTOM / height)
        size = (1 - (left + RIGHT) / self.width, 1 - (top + BOTTOM) / height)
        axes = figure.add_axes((*sides, *size))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(COLOURS["soft"])
        axes.tick_params(length=0, pad=8)
        axes.tick_params(axis="x", length=4, pad=4, color=COLOURS["soft"])
        axes.grid(axis="x" if names else "y", color=COLOURS["grid"])
        axes.set_axisbelow(True)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        if names:
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            most = max(max(s.high or s.y) for s in self.series)
            axes.set_xlim(0.0, 1.05 * most)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=self.whole_x))
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            axes.set_xlim(*(self.x_range or _ends([s.x for s in self.series], with_zero=False)))
            parts = [part for s in self.series for part in (s.y, s.low, s.high) if part is not None]
            axes.set_ylim(*(self.y_range or _ends(parts, with_zero=True)))
        handles = [_draw_series(axes, series, self.width) for series in self.series]
        if shown:
            figure.legend(
                handles=[h for h, s in zip(handles, self.series, strict=True) if s.label],
                labels=[series.label for series in shown],
                loc="upper left",
                bbox_to_anchor=(left / self.width, 1.0),
                ncols=columns,
                frameon=False,
                borderpad=0.2,
                borderaxespad=0.0,
                handlelength=1.8,
            )


def _ends(parts: Sequence[Sequence[float]], *, with_zero: bool) -> tuple[float, float]:
    known = [value for part in parts for value in part if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low = min(low, 0.0) if with_zero else low
    space = (high - low) * 0.05 or 0.5
    return (low, high + space) if with_zero else (low - space, high + space)


def _draw_series(axes: Any, series: Series, width: int) -> Any:
    """Draws a series; returns its handle for the legend."""
    known = [i for i, p in enumerate(zip(series.x, series.y, strict=True)) if _finite(*p)]
    x, y = [series.x[i] for i in known], [series.y[i] for i in known]
    colour = COLOURS[f"s{series.style}"]
    line: dict[str, Any] = {"color": colour, "linestyle": DASHES[series.style], "linewidth": 2}
    if series.kind == "bars":
        return axes.bar(x, y, 0.8, facecolor=colour, edgecolor=colour, alpha=0.5)
    if series.kind == "area":
        fill = axes.fill_between(x, y, facecolor=colour, alpha=0.35)
        axes.plot(x, y, **line | {"linewidth": 1.25})
        return fill
    mark = {
        "marker": MARKS[series.style],
        "markersize": 4 if series.style == BACKGROUND else 7,
        "markerfacecolor": colour,
        "markeredgecolor": COLOURS["paper"],
    }
    spans = [
        (x, low, high)
        for x, low, high in zip(series.x, series.low or (), series.high or (), strict=False)
        if _finite(x, low, high)
    ]
    if series.kind == "line":
        if spans:
            axes.fill_between(*zip(*spans, strict=True), facecolor=colour, alpha=0.16, linewidth=0)
        return axes.plot(x, y, **line, **mark)[0]
    for place, low, high in spans:
        ends = (
            ((low, high), (place, place)) if series.kind == "rows" else ((place,) * 2, (low, high))
        )
        axes.plot(*ends, color=colour, linewidth=1.5)
    points = (y, x) if series.kind == "rows" else (x, y)
    handle = axes.plot(*points, linestyle="none", **mark)[0]
    if series.names is not None:
        _draw_names(axes, x, y, [series.names[i] for i in known], width)
    return handle


def _draw_names(
    axes: Any, x: Sequence[float], y: Sequence[float], names: Sequence[str], width: int
) -> None:
    """Names beside points; those of points that all but coincide stand in rows."""
    below = math.inf
    for place, name in sorted(zip(zip(x, y, strict=True), names, strict=True), key=_height):
        across, up = axes.transData.transform(place)
        below = min(up, below - NAME_ROW)
        fits = across + 9 + CHARACTER * len(name) < width
        axes.annotate(
            name,
            place,
            xytext=(9 if fits else -9, below - up),
            textcoords="offset points",
            ha="left" if fits else "right",
            va="center",
        )


def _height(named: tuple[tuple[float, float], str]) -> float:
    return -named[0][1]


def _finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


def _inline(text: str, alt: str, width: int, height: int) -> str:
    """The drawing for a page: presentation attributes in place of styles, variables of colours."""
    body = text[text.index("<svg") :]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r' id="[\w.]+_\d+"', "", body)  # of groups; others are hashes of their content
    body = re.sub(r' style="([^"]*)"', _attributes, body)
    body = re.sub(r">\s+<", "><", body).replace("\n", " ")
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    box, alt = f'viewBox="0 0 {width} {height}"', html.escape(alt)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box} '
        f'role="img" aria-label="{alt}" class="chart"><title>{alt}</title>{body}'
    )


def _attributes(found: re.Match[str]) -> str:
    pairs = (part.partition(":")[::2] for part in found[1].split(";"))
    kept = ((name.strip(), value.strip()) for name, value in pairs)
    return "".join(f' {name}="{value}"' for name, value in kept if name and "font" not in name)
