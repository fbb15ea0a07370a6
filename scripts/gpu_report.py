"""One JSON and one table of what `gpu_check.sh` has done so far; the standard library alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def steps_of(path: Path) -> list[Row]:
    """Lines of name, seconds and outcome, tabs between them."""
    rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()]
    return [{"step": name, "seconds": int(s), "outcome": how} for name, s, how in rows]


def results_of(parts: Path) -> dict[str, Any]:
    """The benchmarks' JSON files by name; a file that is no JSON is told as such."""
    found: dict[str, Any] = {}
    for path in sorted(parts.rglob("*.json")):
        name = path.relative_to(parts).with_suffix("").as_posix()
        try:
            found[name] = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            found[name] = {"unreadable": str(error)}
    return found


def table(rows: list[Row]) -> str:
    """The steps, and how long all of them took."""
    width = max(len(row["step"]) for row in rows)
    lines = [f"{row['step']:<{width}}  {row['seconds']:>4} s  {row['outcome']}" for row in rows]
    total = sum(row["seconds"] for row in rows)
    return "\n".join([*lines, f"{'together':<{width}}  {total:>4} s"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("steps", type=Path, help="what was run")
    options.add_argument("parts", type=Path, help="folder of the benchmarks' JSON files")
    options.add_argument("out", type=Path, help="file to write")
    options.add_argument("--show", action="store_true", help="print the table")
    given = options.parse_args()
    rows = steps_of(given.steps)
    value = {"steps": rows, "results": results_of(given.parts)}
    given.out.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if given.show:
        print(table(rows))


if __name__ == "__main__":
    main()
