"""Fused kernels under Triton's interpreter, all tests of this folder in one process of their own.

The interpreter replaces `triton.jit` when Triton is imported, after which nothing can be compiled
in that process. One process for all: each would import torch and Triton anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_kernels_as_python() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "no:xdist", str(FOLDER)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for path in FOLDER.glob("test_*.py"):
        takes_a_device = "device: torch.device" in path.read_text("utf-8")
        if takes_a_device and path != Path(__file__):
            assert f"PASSED tests/kernels/{path.name}::" in done.stdout, path.name
