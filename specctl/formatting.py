"""Figures as text, one way for terminals, cards and pages; intervals have `stats.Interval.text`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

NOTHING = "-"
"""Stands where a figure is not defined."""


def number(value: float | None, spec: str = ".2f") -> str:
    """A figure; a dash where it is not defined."""
    return NOTHING if value is None or not math.isfinite(value) else format(value, spec)


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
