"""The runtime on a serving box: it must load and decode without the libraries of fitting.

`lint-imports` proves it for written imports; this shows it for the ones that run.
"""

from __future__ import annotations

import json
import subprocess
import sys

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

DECODE = """
import specctl
assert "torch" not in sys.modules, "importing specctl alone must not cost torch"
import specctl.runtime.api
import torch
torch.set_num_threads(1)
decoder = specctl.Decoder.from_pretrained("embedded", "embedded", policy="eagle2", device="cpu")
[answer] = decoder.generate("def add(a, b):", max_new_tokens=8)
loaded = sorted(set(HIDDEN) & {name.partition(".")[0] for name in sys.modules})
print(json.dumps({"tokens": len(answer.token_ids), "loaded": loaded}))
"""


def python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_runtime_decodes_where_the_libraries_of_fitting_are_not_installed() -> None:
    shown = json.loads(python(HIDE + DECODE))
    assert shown["loaded"] == []
    assert 1 <= shown["tokens"] <= 8


def test_command_line_starts_without_heavy_libraries() -> None:
    code = """
import json, sys
import specctl.cli
heavy = ("torch", "transformers", "sklearn", "polars", "pyarrow", "lightgbm", "matplotlib", "onnx")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
    assert json.loads(python(code)) == []
