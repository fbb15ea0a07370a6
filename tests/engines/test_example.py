"""The example of the loop with vLLM, as it stands, in the environment of `make engines`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM here; make engines has one")

from specctl.logs.trace_set import TraceSet
from tests.engines.vllm_engine import ENVIRONMENT

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_loop.py"
CPU = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 8"
"""For a model of a few megabytes."""


@pytest.mark.nightly
def test_the_loop_with_vllm_runs(tmp_path: Path) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"PATH": tools, "OUT": str(tmp_path / "out"), "VLLM_OPTIONS": CPU}
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, **given},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM served 32 prompts" in done.stdout
    assert len(TraceSet.open(str(tmp_path / "out" / "traces")).prompt_ids) == 32, "none is lost"
    tuned = json.loads((tmp_path / "out" / "tuned" / "tune.json").read_text())
    assert tuned["for_engine"] == "vllm"
    config = json.loads((tmp_path / "out" / "serve" / "speculative-config.json").read_text())
    assert 1 <= config["num_speculative_tokens"] <= 5
