"""Fused kernels under Triton's interpreter, all files in one process of their own.

The interpreter replaces `triton.jit` when Triton is imported, after which nothing can be compiled
in that process. One process for all: each would import torch and Triton anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"


def test_kernels_as_python() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "no:xdist", str(FOLDER)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for path in FOLDER.glob("test_*.py"):
        assert f"PASSED tests/kernels/interpreted/{path.name}::" in done.stdout, path.name
