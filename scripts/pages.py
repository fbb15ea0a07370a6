"""Figures on pages: Markdown tables, and the parts that scripts write between two markers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specctl.stats import Interval


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, its columns but the first to the right."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]])


def interval(value: Mapping[str, Any]) -> Interval:
    """From JSON, where an end that is not known is null."""
    names = ("value", "low", "high")
    return Interval(*(math.nan if value[name] is None else value[name] for name in names))


def with_part(page: str, name: str, script: str, part: str) -> str:
    """The page with another part between its markers; `SystemExit` unless both stand there once."""
    begin, end = f"<!-- begin {name}: {script} -->\n", f"<!-- end {name} -->"
    if (page.count(begin), page.count(end)) != (1, 1):
        raise SystemExit(f"error: the page needs {begin.strip()} and {end}, each once")
    head, _, rest = page.partition(begin)
    return f"{head}{begin}{part}{end}{rest.partition(end)[2]}"
