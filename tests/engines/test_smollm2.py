"""`make smollm2`, all of its stages, on the embedded pair."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("xllamacpp", reason="no xllamacpp here; make engines has it")
pytest.importorskip("gguf", reason="no gguf here; make engines has it")
pytest.importorskip("accelerate", reason="no accelerate here: GGUF targets need it")

from scripts.smollm2 import __main__ as smollm2
from scripts.smollm2 import publish
from specctl.embedded import embedded_path
from specctl.engines.gguf_files import write_model

PROMPTS = Path(smollm2.ROOT, "specctl/embedded/prompts.jsonl")


@pytest.mark.nightly
def test_from_files_to_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts and calls are as predicted in float32; a second call keeps every stage."""
    target, prompts = tmp_path / "target.gguf", tmp_path / "prompts.jsonl"
    write_model(embedded_path("target"), target, "float32")
    prompts.write_text("\n".join(PROMPTS.read_text("utf-8").splitlines()[::6]), "utf-8")
    options = ["--target", target, "--head", embedded_path("eagle3"), "--prompts", prompts]
    options += ["--tokens", 16, "--threads", 1, "--folder", tmp_path]
    words = [str(word) for word in options]
    with patch("sys.argv", ["smollm2", *words]):
        smollm2.main()
        before = (tmp_path / publish.NAME).read_text("utf-8")
        smollm2.main()
    kept = capsys.readouterr().out.partition("table.md")[2]
    assert "$ specctl" not in kept
    assert (tmp_path / publish.NAME).read_text("utf-8") == before
    result = json.loads(before)
    for one in result["settings"]:
        of = one["groups"][publish.ALL]
        if one["setting"] != publish.SYNTHETIC:
            assert of["num_equal"] == result["num_prompts"], one
        if of["predicted"]:
            assert abs(of["predicted_calls"] - of["calls"]) <= 0.02 * of["calls"], one
    assert (tmp_path / publish.PICTURE).exists()
