"""Fused kernels under Triton's interpreter, file by file, each in a process of its own.

The interpreter replaces `triton.jit` when Triton is imported, after which nothing can be compiled
in that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_kernels_as_python(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(FOLDER / name)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
