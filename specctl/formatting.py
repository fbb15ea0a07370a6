"""Figures as text, one way for terminals, cards and pages; intervals have `stats.Interval.text`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

NOTHING = "-"
"""Stands where a figure is not defined."""


def number(value: Any, spec: str = ".2f") -> str:
    """A figure or an interval by a format; a dash where it is not defined."""
    if hasattr(value, "text"):
        return str(value.text(spec))
    is_unknown = value is None or (isinstance(value, float) and not math.isfinite(value))
    return NOTHING if is_unknown else format(value, spec)


def count(value: int, noun: str) -> str:
    """`1 prompt`, `2,000 prompts`."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def sampling(settings: dict[str, Any]) -> str:
    """`greedy`, or the temperature."""
    temperature = settings["temperature"]
    return f"temperature {temperature}" if temperature else "greedy"


def fixture_note(target: str) -> str:
    """The sentence that figures of the embedded pair carry; empty for other pairs."""
    if target.startswith("embedded"):
        return "the embedded pair is a fixture, no claim about large models"
    return ""


@dataclass(frozen=True)
class Table:
    """Cells as text, the first of a row its name; the legend says what short heads mean."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str = ""

    @classmethod
    def of(
        cls, title: str, records: Iterable[Any], columns: Mapping[str, str], legend: str = ""
    ) -> Table:
        """A table of records, one a row.

        Args:
            columns: by head, the path of an attribute and how it is written, such as
                `"train.mean_loss:.2f"`; see `number`.
        """
        parts = [field.partition(":") for field in columns.values()]
        found = [[number(attrgetter(p)(one), spec) for p, _, spec in parts] for one in records]
        return cls(title, tuple(columns), found, legend)


def terminal_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, left: int = 1
) -> Any:
    """A table for the terminal; names are shown as they are, never read as markup.

    Args:
        left: columns that are aligned to the left.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None if title is None else Text(title), title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(value) if isinstance(value, str) else value for value in row))
    return table
