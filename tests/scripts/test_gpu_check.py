"""The GPU script: what it would run, and what it says when time is up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_time_every_step_is_named_and_nothing_passes(tmp_path: Path) -> None:
    here = os.environ | {"PYTHON": sys.executable, "DEVICE": "cpu", "LIMIT_S": "0"}
    done = subprocess.run(
        ["bash", "scripts/gpu_check.sh"],
        cwd=ROOT,
        env=here | {"OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "gpu_check-cpu.json").read_text())
    assert found["results"] == {}
    assert {step["outcome"] for step in found["steps"]} == {"no time left"}
    names = " ".join(step["step"] for step in found["steps"])
    kernels = [path.name for path in (ROOT / "benchmarks" / "kernels").glob("bench_*.py")]
    wanted = ["bench_cuda_decode.py", "bench_cuda_profile.py", "bench_dense.py", *kernels]
    assert all(name in names for name in wanted)
    assert all(step["step"] in done.stdout for step in found["steps"])
