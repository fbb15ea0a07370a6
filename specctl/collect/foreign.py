"""Files that others made, read by a child process before this one opens them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from specctl.artifacts.strict_json import shown
from specctl.collect.commits import Segment
from specctl.errors import TraceCorruptError

COMMAND = [sys.executable, "-m", "specctl.collect.inspection"]
MAX_WAIT_S = 1800.0
"""For all files of one call; the child's own limit is on its CPU time."""


def inspect_files(files: Iterable[tuple[Path, Segment, str]]) -> None:
    """Has a child process read files, each with what it must hold and its name in messages.

    Raises:
        TraceCorruptError: naming the first one that cannot be read, or that the child died of.
    """
    for _, name, reason in refusals(files):
        raise TraceCorruptError(
            name,
            expected="a Parquet file that can be read, with the columns and rows of its record",
            found=reason,
            fix="do not use it; collect or fetch it again",
        )


def refusals(files: Iterable[tuple[Path, Segment, str]]) -> list[tuple[Segment, str, str]]:
    """Those of the files that cannot be read: segment, name and reason of each."""
    left, found = list(files), []
    while left:
        lines, status = _run(left)
        done = 0
        for line in lines:
            word, _, reason = line.partition(" ")
            done += word in ("ok", "refused")
            if word == "refused":
                found.append((*left[done - 1][1:], shown(reason.partition(" ")[2])))
        if done < len(left):  # the child died of this one; another child takes the rest
            found.append((*left[done][1:], f"one that its reader died of (status {status})"))
            done += 1
        left = left[done:]
    return found


def _run(files: list[tuple[Path, Segment, str]]) -> tuple[list[str], int]:
    asked = "".join(
        json.dumps(
            {"path": str(path.absolute()), "table": segment.table, "num_rows": segment.num_rows}
        )
        + "\n"
        for path, segment, _ in files
    )
    try:
        child = subprocess.run(
            COMMAND, input=asked, capture_output=True, text=True, timeout=MAX_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        told = error.stdout or b""
        return (told.decode() if isinstance(told, bytes) else told).splitlines(), -1
    return child.stdout.splitlines(), child.returncode
