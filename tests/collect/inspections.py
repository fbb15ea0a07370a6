"""A child that finds every file sound, and files that only one library refuses."""

from __future__ import annotations

from pathlib import Path

from specctl.collect import foreign


def break_order(path: Path) -> None:
    """The last column's order becomes one that pyarrow skips, and polars refuses."""
    content = path.read_bytes()
    place = content.rindex(b"\x1c\x00\x00")
    path.write_bytes(content[:place] + b"\x80" + content[place + 1 :])


def all_ok(files: list[foreign.File]) -> foreign.Told:
    lines = [line for number in range(len(files)) for line in (f"begin {number}", f"ok {number}")]
    return foreign.Told(lines, "status 0", True, "")
