"""Benchmarks, scripts and examples import names of the package that exist."""

from __future__ import annotations

import ast
import json
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def code(path: Path) -> str:
    """Python source of a file, of a notebook its cells."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def test_names_of_the_package_exist() -> None:
    command = ["git", "ls-files", "benchmarks", "scripts", "examples"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not listed.stdout:
        pytest.skip("no checkout of git")
    absent = []
    for name in (n for n in listed.stdout.split() if n.endswith((".py", ".ipynb"))):
        for node in ast.walk(ast.parse(code(ROOT / name))):
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specctl")):
                continue
            try:
                module = import_module(str(node.module))
            except ModuleNotFoundError as error:
                absent.append(f"{name}: {error.name}")
                continue
            for one in node.names:
                if not hasattr(module, one.name):
                    try:
                        import_module(f"{node.module}.{one.name}")
                    except ModuleNotFoundError:
                        absent.append(f"{name}: {node.module}.{one.name}")
    assert absent == []
