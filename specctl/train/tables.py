"""Tables of fits' reports for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Any:
    """A rich table, narrow, all columns to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    style: Any = {"box": SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
    made = Table(caption=caption, caption_justify="left", **style)
    for column in columns:
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def number(value: float | None, spec: str) -> str:
    """A figure for a cell; a dash where it is not known."""
    return "-" if value is None else format(value, spec)
