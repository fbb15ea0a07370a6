"""Python from which the libraries of collecting and fitting are hidden."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HIDDEN = (
    "polars",
    "pyarrow",
    "sklearn",
    "scipy",
    "lightgbm",
    "rich",
    "typer",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "cryptography",
)
HIDE = f"""
import json, sys
HIDDEN = {HIDDEN!r}

class Hiding:
    "A finder that does not see some packages: as if they were not installed."
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
for name in HIDDEN:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{{name}} is not hidden: the test would show nothing")
"""


def python(code: str, *arguments: str) -> str:
    """Standard output of a fresh interpreter in the repository's root."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout
