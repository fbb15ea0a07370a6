"""The examples run as they stand, on the packaged pair, at sizes that take seconds."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "first_look.ipynb"
SMALL = {"NUM_TOKENS": "12"}
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
MADE = {
    "own_pair.sh": ["tuned/tune.json", "tuned/policy/config.json", "results/results.json"],
    "production_responses.py": ["responses.jsonl", "traces/trace.json"],
    "team_registry.sh": ["registry/registry.json", "pulled/config.json"],
    "lossy_policy.sh": ["mars/config.json", "results/results.json"],
}
"""By example that needs no engine, files that it leaves; tests/engines/test_example.py has the
other one."""


def test_every_example_is_run_and_listed() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    found = {path.name for path in EXAMPLES.iterdir() if path.name != "README.md"}
    assert found == {*MADE, "vllm_loop.py", NOTEBOOK.name}
    assert all(f"[{name}]({name})" in page for name in found)


@pytest.mark.parametrize("name", MADE)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """From any folder, with nothing but `specctl` on the path."""
    environment = {**os.environ, **SMALL, "OUT": str(tmp_path / "out"), "PATH": TOOLS}
    (tmp_path / "out").mkdir()
    command = ["bash" if name.endswith(".sh") else sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for made in MADE[name]:
        assert (tmp_path / "out" / made).exists(), f"{name} left no {made}"
    assert "Traceback" not in done.stderr


def kinds(cell: Any) -> list[str]:
    """The kinds of a cell's outputs, in order."""
    outputs = cell.get("outputs", [])
    return [str((one.get("data") and sorted(one["data"])) or one["output_type"]) for one in outputs]


def test_the_notebook_runs_and_its_outputs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures may differ in their last digits from machine to machine; their kinds may not."""
    monkeypatch.setenv("PATH", TOOLS)
    kept = nbformat.read(NOTEBOOK, as_version=4)
    fresh = copy.deepcopy(kept)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell["outputs"] = []
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(fresh, timeout=600, kernel_name="python3", resources=resources).execute()
    assert [kinds(cell) for cell in kept.cells] == [kinds(cell) for cell in fresh.cells]
    pictures = [cell for cell in kept.cells if any("image/png" in kind for kind in kinds(cell))]
    assert len(pictures) == 2
    assert all(cell.execution_count for cell in kept.cells if cell.cell_type == "code")
