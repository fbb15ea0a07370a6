"""docs/systems.json as lines of docs/systems.csv: one figure of one row each."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS = ("papers", "shapes", "speed", "budgets", "long")
COLUMNS = ("table", "row", "figure", "value", "low", "high")


def write_csv(path: Path, result: dict[str, Any]) -> None:
    """Writes every figure of every table.

    Args:
        result: what is written to systems.json; an interval is `{value, low, high}` there.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        lines.writerows(_lines(result))


def _lines(result: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    tables = {part: result[part] for part in PARTS}
    for table, rows in tables.items():
        for row in rows:
            named = {
                name: value for name, value in row.items() if not isinstance(value, float | dict)
            }
            name = "; ".join(f"{key}={value}" for key, value in named.items() if value is not None)
            for figure, value in row.items():
                if isinstance(value, dict):
                    low, high = _rounded(value["low"]), _rounded(value["high"])
                    yield table, name, figure, _rounded(value["value"]), low, high
                elif isinstance(value, float):
                    yield table, name, figure, _rounded(value), "", ""


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
