"""The examples with vLLM, as they stand, in the environment of `make engines`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM here; make engines has one")

from specctl.artifacts import load_artifact
from specctl.logs.trace_set import TraceSet
from specctl.policy import Chain, RootOnly
from tests.engines.vllm_engine import ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 8"
"""For a model of a few megabytes."""


def run(name: str, folder: Path) -> str:
    """What an example prints, with its files in `out`."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"PATH": tools, "OUT": str(folder / "out"), "VLLM_OPTIONS": CPU}
    (folder / "out").mkdir()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", **given},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_policy_keeps_up_with_vllms_traffic(tmp_path: Path) -> None:
    """The alarm rang once, a longer chain took the alias, and all texts stayed what they were."""
    said = run("drift_loop.py", tmp_path)
    assert said.count("ALARM at prompt") == 1
    assert "120 of 120 texts are the same" in said
    places = (tmp_path / "out" / name / "policy" for name in ("first", "again"))
    first, again = (load_artifact(place).policy.shape for place in places)
    assert isinstance(first, Chain)
    assert isinstance(again, Chain)
    assert again.num_draft_tokens > first.num_draft_tokens


@pytest.mark.nightly
def test_the_loop_with_vllm_runs(tmp_path: Path) -> None:
    said = run("vllm_loop.py", tmp_path)
    assert "vLLM served 32 prompts" in said
    assert len(TraceSet.open(str(tmp_path / "out" / "traces")).prompt_ids) == 32, "none is lost"
    tuned = json.loads((tmp_path / "out" / "tuned" / "tune.json").read_text())
    assert tuned["for_engine"] == "vllm"
    config = tmp_path / "out" / "serve" / "speculative-config.json"
    pays = load_artifact(tmp_path / "out" / "tuned" / "policy").policy.shape != RootOnly()
    assert config.exists() == pays, "drafting is served if it pays on this machine's clock"
    assert not pays or 1 <= json.loads(config.read_text())["num_speculative_tokens"] <= 5
