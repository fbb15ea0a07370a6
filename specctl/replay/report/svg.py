"""Elements of figures: marks, lines and texts, built as a tree, so that every text is escaped.

Colours are classes that the page's style sheet fills, so a figure follows the light and the dark
theme and paper; styles also differ by dash or mark, so none is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree as ET

BACKGROUND = 6
"""The style of what others stand out from."""
CHARACTER = 7.2
"""Width of a character of the figures' type, px: enough to place labels."""


def figure(alt: str, width: int, height: int) -> ET.Element:
    """An empty drawing that says what it shows."""
    box = {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": alt, "class": "chart"}
    svg = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **box})
    ET.SubElement(svg, "title").text = alt
    return svg


def ticks(low: float, high: float, num: int = 6, *, whole: bool = False) -> list[float]:
    """Round values from `low` to `high`, about `num` of them: steps of 1, 2 or 5 times 10^n."""
    rough = max((high - low) / num, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def mark(svg: ET.Element, x: float, y: float, style: int) -> None:
    """A circle, square, diamond or triangle; a dot for style 6, the background."""
    offsets = (
        None,
        ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
        ((0, -5), (5, 4), (-5, 4)),
    )[style % 4]
    name = f"mark s{style}"
    if offsets is None or style == BACKGROUND:
        size = "2.2" if style == BACKGROUND else "3.5"
        ET.SubElement(svg, "circle", {"cx": f"{x:g}", "cy": f"{y:g}", "r": size, "class": name})
    else:
        polygon(svg, [(x + dx, y + dy) for dx, dy in offsets], name)


def line(svg: ET.Element, start: tuple[float, float], end: tuple[float, float], name: str) -> None:
    places = zip(("x1", "y1", "x2", "y2"), (*start, *end), strict=True)
    ET.SubElement(svg, "line", {**{k: f"{v:g}" for k, v in places}, "class": name})


def polygon(svg: ET.Element, places: Sequence[tuple[float, float]], name: str) -> None:
    text = " ".join(f"{x:g},{y:g}" for x, y in places)
    ET.SubElement(svg, "polygon", {"points": text, "class": name})


def rect(svg: ET.Element, x: float, y: float, width: float, height: float, name: str) -> None:
    places = {"x": x, "y": y, "width": width, "height": max(0.0, height)}
    ET.SubElement(svg, "rect", {**{k: f"{v:g}" for k, v in places.items()}, "class": name})


def text(
    svg: ET.Element, x: float, y: float, text: str, anchor: str, name: str = "tick"
) -> ET.Element:
    places = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor, "class": name}
    element = ET.SubElement(svg, "text", places)
    element.text = text
    return element
