"""Runs the CUDA tests, one process a file, so that a failed launch ends the tests of one file.

    python scripts/cuda_tests.py            6 files at once, after the first two
    python scripts/cuda_tests.py --list     only their names

Files stand in the order in which they say most: one small kernel, attention, the other kernels,
the runtime, the rest. The first two run alone: if they fail, what follows says little. On a machine
with the runtime's dependencies alone some files cannot be imported; they are named on stderr, with
what they lack. Anything else that keeps a file from being imported is left to pytest.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONAL = ("polars", "pyarrow", "sklearn", "scipy", "lightgbm", "typer", "rich", "matplotlib")
OPTIONAL += ("onnx", "onnxruntime", "jinja2", "cryptography", "hypothesis")
FIRST = ("kernels/test_commit_kv", "kernels/test_tree_attention", "kernels/", "runtime/")
HAS_CUDA = re.compile(r"mark\.cuda|def test_\w+\([^)]*\bdevice: torch\.device")
"""A mark, or a test over all backends (tests/kernels/conftest.py)."""


def files() -> Iterator[Path]:
    """The test files that have CUDA tests and can be imported here, the first ones first."""

    def place(path: Path) -> tuple[int, str]:
        name = path.relative_to(ROOT / "tests").as_posix()
        at = [place for place, word in enumerate(FIRST) if name.startswith(word)]
        return (at[0] if at else len(FIRST)), name

    for path in sorted((ROOT / "tests").rglob("test_*.py"), key=place):
        if HAS_CUDA.search(path.read_text("utf-8")):
            missing = lacks(path)
            if missing is None:
                yield path.relative_to(ROOT)
            else:
                print(f"left out, no {missing}: {path.relative_to(ROOT)}", file=sys.stderr)


def lacks(path: Path) -> str | None:
    """The library that a file needs and that is not here; None if it has all."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        return missing if missing in OPTIONAL else None
    except Exception:  # pytest says it better
        return None
    return None


def run(path: Path) -> bool:
    """Runs one file's CUDA tests; says what came out, and all of it if any failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda"]
    done = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True)
    passed = done.returncode == 0
    print(f"{path}: {done.stdout.strip().splitlines()[-1:]}")
    if not passed:
        print(done.stdout, done.stderr, sep="\n")
    sys.stdout.flush()
    return passed


def main() -> int:
    sys.path.insert(0, str(ROOT))
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--list", action="store_true", help="print the files only")
    options.add_argument("--jobs", type=int, default=6, help="files at once, 1 or more")
    given, found = options.parse_args(), list(files())
    if given.list:
        print(*found, sep="\n")
        return 0
    passed = [run(path) for path in found[:2]]
    with ThreadPoolExecutor(given.jobs) as pool:  # most of their time is compilation, on the host
        passed += pool.map(run, found[2:])
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
