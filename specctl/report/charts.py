"""Charts as inline SVG: drawn by matplotlib, coloured by the style sheet of the page.

Every colour becomes a variable of the style sheet, so charts follow the light and dark theme and
print. Styles also differ by dash or mark. Inline styles are removed, since the page's content
security policy blocks them.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from specctl.stats import Interval

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 44
"""Margins around the axes, px."""
NAME_ROW, LEGEND_ROW = 14, 18
"""Heights of a name beside a point and of a line of the legend, px."""
NARROW = 360
"""Width of the drawing for a phone."""
MANY = 24
"""Longer lines have no marks."""
CHARACTER = 7.2
"""Approximate width of a character at 12 px."""
MARKS = ("o", "s", "D", "^", "o", "s")
DASHES: tuple[Any, ...] = ("-", (0, (7, 4)), (0, (2, 3)), (0, (9, 3, 2, 3)), "-", (0, (5, 2)))
COLOURS = {"grid": "#0000b0", "soft": "#0000b1", "paper": "#0000b2"} | {
    f"s{style}": f"#0000a{style}" for style in range(6)
}
"""Placeholders, each replaced by the variable of its name."""
SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "specctl", "text.parse_math": False, "font.size": 12,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.edgecolor": COLOURS["soft"], "axes.axisbelow": True, "grid.color": COLOURS["grid"],
    "xtick.major.size": 4, "xtick.major.pad": 4, "xtick.color": COLOURS["soft"],
    "xtick.labelcolor": "black", "ytick.major.size": 0, "ytick.major.pad": 8,
    "legend.frameon": False, "legend.borderpad": 0.2, "legend.borderaxespad": 0.0,
    "legend.handlelength": 1.8,
}  # fmt: skip
Box = tuple[float, float, float, float]
"""Left, right, bottom and top, px."""


@dataclass(frozen=True)
class Series:
    """Points with an optional interval; points that are not finite are left out."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    names: Sequence[str] | None = None  # written beside the points
    kind: Literal["line", "points", "level"] = "line"
    """A line with a band for the interval, points with error bars, or a line across with a band."""
    style: int = 0  # 0 to 5: the colour, dash and mark

    @classmethod
    def of(cls, label: str, x: Sequence[float], values: Sequence[Interval], **looks: Any) -> Series:
        """Intervals over x."""
        y, low, high = ([getattr(value, n) for value in values] for n in ("value", "low", "high"))
        return cls(label, x, y, low, high, **looks)


@dataclass(frozen=True)
class Chart:
    """Two axes and series between them."""

    alt: str  # the figure in words
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_range: tuple[float, float] | None = None  # by default of the data and 0
    whole_x: bool = False  # ticks at whole numbers only
    width: int = 640
    height: int = 320

    def markup(self) -> str:
        """The drawing, and a narrow one for phones; the style sheet shows one of them."""
        narrow = replace(self, width=NARROW, height=min(self.height, 290))
        return self.svg("chart wide") + narrow.svg("chart narrow")

    def svg(self, css_class: str) -> str:
        """The chart as markup with escaped text."""
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(SETTINGS)
            figure = Figure(figsize=(self.width / 72, self.height / 72), dpi=72)
            FigureCanvasSVG(figure)
            self._draw(figure)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        title = " against ".join(filter(None, (self.y_label, self.x_label)))
        size = f'viewBox="0 0 {self.width} {self.height}" class="{css_class}"'
        return _inline(buffer.getvalue(), title, self.alt, size)

    def _draw(self, figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        shown = [series.label for series in self.series if series.label]
        widest = max((40 + CHARACTER * len(label) for label in shown), default=1.0)
        columns = max(1, min(len(shown), int((self.width - LEFT) / widest)))
        top = TOP + LEGEND_ROW * math.ceil(len(shown) / columns)
        size = (1 - (LEFT + RIGHT) / self.width, 1 - (top + BOTTOM) / self.height)
        sides = (LEFT / self.width, BOTTOM / self.height)
        axes = figure.add_axes((*sides, *size))
        axes.grid(axis="y")
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        handles = [_draw_series(axes, series) for series in self.series]
        ticks = {"steps": [1, 2, 5, 10], "integer": self.whole_x}
        axes.xaxis.set_major_locator(MaxNLocator(round(self.width / 80), **ticks))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.set_ylim(self.y_range or (min(0.0, axes.dataLim.y0), None))
        _draw_names(axes, self.series)
        if shown:
            labelled = [h for h, s in zip(handles, self.series, strict=True) if s.label]
            place = {"loc": "upper left", "bbox_to_anchor": (LEFT / self.width, 1.0)}
            figure.legend(labelled, shown, ncols=columns, **place)


def _draw_series(axes: Any, series: Series) -> Any:
    """Draws a series; returns its handle for the legend."""
    colour, none = COLOURS[f"s{series.style}"], np.full(len(series.x), np.nan)
    x, y, low, high = (
        none if part is None else np.array(part, float)
        for part in (series.x, series.y, series.low, series.high)
    )
    known, bounded = np.isfinite(x) & np.isfinite(y), np.isfinite(x) & np.isfinite(high - low)
    x, y, ends = x[known], y[known], (x[bounded], low[bounded], high[bounded])
    look: dict[str, Any] = {
        "marker": "" if series.kind == "line" and len(x) > MANY else MARKS[series.style],
        "markersize": 7,
        "markerfacecolor": colour,
        "markeredgecolor": COLOURS["paper"],
        "markeredgewidth": 1,
        "color": colour,
        "linewidth": 2,
        "linestyle": DASHES[series.style] if series.kind == "line" else "none",
    }
    if series.kind == "level":
        axes.axhspan(low[0], high[0], facecolor=colour, alpha=0.14, linewidth=0)
        return axes.axhline(y[0], color=colour, linewidth=2, linestyle=DASHES[series.style])
    if series.kind == "line":
        axes.fill_between(*ends, facecolor=colour, alpha=0.16, linewidth=0)
    else:
        axes.vlines(*ends, colors=colour)
    return axes.plot(x, y, **look)[0]


def _draw_names(axes: Any, series: Sequence[Series]) -> None:
    """Draws names of points, if possible where they cover no point and no other name."""
    points = [
        (*axes.transData.transform((x, y)), (x, y), name)
        for one in reversed(series)  # the last series has precedence
        for x, y, name in zip(one.x, one.y, one.names or [""] * len(one.x), strict=True)
        if one.names or one.kind == "points"
    ]
    taken = [(x - 5, x + 5, y - 5, y + 5) for x, y, *_ in points]
    edges = axes.get_window_extent()
    for across, up, point, name in points:
        if not name:
            continue
        length = CHARACTER * len(name)
        places = [
            (side * 9, lift * NAME_ROW, "left" if side > 0 else "right")
            for lift in (0, 1, -1, 2, -2, 3, -3)
            for side in (1, -1)
        ]
        for right, lifted, side in places:
            start = across + right - (length if side == "right" else 0)
            box = (start, start + length, up + lifted - 6, up + lifted + 6)
            fits = box[0] >= edges.x0 and box[1] <= edges.x1 + RIGHT
            if fits and not any(_overlap(box, other) for other in taken):
                break
        else:
            right, lifted, side = places[0]
        taken.append(box)
        offset = {"xytext": (right, lifted), "textcoords": "offset points"}
        axes.annotate(name, point, ha=side, va="center", **offset)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _inline(text: str, title: str, alt: str, size: str) -> str:
    """Makes matplotlib's SVG fit for a page: attributes for styles, variables for colours."""
    body = text[text.index("<svg") :]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r' id="[\w.]+_\d+"', "", body)  # of groups; others are hashes of their content
    body = re.sub(r' style="([^"]*)"', _attributes, body)
    body = re.sub(r' transform="rotate\(-0[^"]*"', "", body)
    body = re.sub(r' (d|x|y|transform)="[^"]*"', _rounded, body)
    body = re.sub(r'(<use [^>]*?) stroke="[^"]*"( stroke-width="[^"]*")?', r"\1", body)
    body = re.sub(r">\s+<", "><", body).replace("\n", " ")
    while (flat := re.sub(r"<g>((?:(?!</?g[ >]).)*)</g>|<g/>", r"\1", body)) != body:
        body = flat  # without empty groups
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    title, alt = html.escape(title), html.escape(alt)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{size} role="img" aria-label="{alt}"><title>{title}</title><desc>{alt}</desc>{body}'
    )


def _rounded(found: re.Match[str]) -> str:
    """Rounds coordinates to a tenth of a pixel."""
    text = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", found[0])
    return re.sub(r"\s+(?=[A-Zz\"])|(?<=[A-Z])\s+", "", text.replace(".0 ", " "))


def _attributes(found: re.Match[str]) -> str:
    pairs = (part.partition(":")[::2] for part in found[1].split(";"))
    kept = ((name.strip(), value.strip()) for name, value in pairs)
    return "".join(f' {name}="{value}"' for name, value in kept if name and "font" not in name)
