"""Python from which packages are hidden, such as the libraries of collecting and fitting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def hide(names: Iterable[str]) -> str:
    """Code that hides packages from what is run behind it."""
    return f"""
import json, sys
HIDDEN = {tuple(names)!r}

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


HIDE = hide(HIDDEN)


def all_but(names: Iterable[str]) -> list[str]:
    """Packages to import of all distributions but these and what they require."""
    shown, rest = {"specctl"}, [*names]
    while rest:
        name = canonicalize_name(rest.pop())
        if name not in shown:
            shown.add(name)
            needs = map(Requirement, requires(name) or ())
            rest += [one.name for one in needs if one.marker is None or one.marker.evaluate()]
    owners = packages_distributions().items()
    return sorted(name for name, of in owners if not shown & {canonicalize_name(one) for one in of})


def python(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a fresh interpreter in the repository's root."""
    command, own = [sys.executable, "-c", code, *arguments], {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=own)
    assert done.returncode == 0, done.stderr
    return done.stdout
