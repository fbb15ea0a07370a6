"""The notebook runs to its end, and its committed outputs are those that it gives now."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.examples.shell import EXAMPLES

NOTEBOOK = EXAMPLES / "first_look.ipynb"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TOLERANCE = 0.02
"""Of counts: on another processor a greedy tie may fall to the other side."""


def committed() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def kinds(cell: Any) -> list[str]:
    """Kinds of outputs, in order; a stream may arrive in several pieces."""
    return [kind for kind, _ in groupby(output.output_type for output in cell.outputs)]


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_it_runs_and_its_counts_are_those_committed(tmp_path: Path) -> None:
    """Counts in cells tagged `exact`; the others hold times of the machine that ran it."""
    ran = tmp_path / "ran.ipynb"
    places = {"PYTHONPATH": str(EXAMPLES.parent), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "jupyter", "execute", "--startup_timeout=600"]
    done = subprocess.run(
        [*command, f"--output={ran}", NOTEBOOK],
        cwd=tmp_path,
        env={**os.environ, **places},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compared = 0
    for now, then in zip(nbformat.read(ran, as_version=4).cells, committed().cells, strict=True):
        if now.cell_type != "code":
            continue
        assert kinds(now) == kinds(then), "run it again and commit it"
        if "exact" in now.metadata.get("tags", ()):
            compared += 1
            words = [NUMBER.sub("N", printed(cell)).split() for cell in (now, then)]
            assert words[0] == words[1]
            figures = [[float(n) for n in NUMBER.findall(printed(cell))] for cell in (now, then)]
            assert figures[0] == pytest.approx(figures[1], rel=TOLERANCE)
    assert compared == 2


def test_its_outputs_are_committed_and_clean() -> None:
    """In order, without an error, a warning or a path of the machine that ran it."""
    code = [cell for cell in committed().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    streams = [output for output in outputs if output.output_type == "stream"]
    assert {output.name for output in streams} == {"stdout"}
    assert not any("/" in NUMBER.sub("", output.text).replace(" / ", "") for output in streams)
