"""The examples run from any folder, show what they promise, and fail where they must."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specctl.artifacts import load_artifact
from tests.examples.shell import EXAMPLES, run_example

SMALL = {"NUM_PROMPTS": "16", "NUM_TOKENS": "8"}
"""Tuning needs eight prompts on each side."""


def passes(name: str, folder: Path, *words: str, **environment: str) -> str:
    code, printed = run_example(name, folder, *words, **environment)
    assert code == 0, printed
    return printed


@pytest.mark.usefixtures("busy_machine")
def test_own_pair(tmp_path: Path) -> None:
    """The tuned policy is decoded beside plain decoding, and its texts are the same."""
    passes("own_pair.sh", tmp_path, **SMALL)
    rows = json.loads((tmp_path / "out" / "results" / "results.json").read_text())
    winner = load_artifact(tmp_path / "out" / "tuned" / "policy")
    assert [row["artifact_digest"] for row in rows] == [None, None, winner.digest]
    assert all(row["equal_to_ar"] for row in rows)


def test_production_responses(tmp_path: Path) -> None:
    """Replay on logged texts says what drafting along them calls."""
    printed = passes("production_responses.py", tmp_path, **SMALL)
    assert "16 of 16 records" in printed
    calls = {
        found[1]: int(found[2])
        for found in re.finditer(r"^(ar|chain\S+)\s+(\d+) ", printed, re.MULTILINE)
    }
    assert calls["ar"] > calls["chain:2"] > calls["chain:5"] > 0


def test_production_responses_of_a_log(tmp_path: Path) -> None:
    """Several turns are kept; records with a system message are left out and counted."""
    user, reply = ({"role": role, "content": "Well"} for role in ("user", "assistant"))
    response = {"choices": [{"message": reply, "finish_reason": "stop"}]}
    asked = [[user], [user, reply, user], [{"role": "system", "content": "Be kind"}, user]]
    lines = [{"request": {"messages": messages}, "response": response} for messages in asked]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    printed = passes("production_responses.py", tmp_path, "log.jsonl", "embedded", "embedded")
    assert "2 of 3 records" in printed
    kept = (tmp_path / "out" / "responses.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["turns"]) for line in kept] == [1, 2]
    assert "2 prompts collected" in printed


def test_team_registry(tmp_path: Path) -> None:
    """Bob runs what prod means, it is rolled back, and an unsigned move does not count."""
    printed = passes("team_registry.sh", tmp_path, **SMALL)
    pulled, second = (load_artifact(tmp_path / "out" / name) for name in ("pulled", "second"))
    assert pulled.digest == second.digest
    assert "no damage" in printed
    assert re.search(r"^\d+ +rollback +prod ", printed, re.MULTILINE)
    first, unmoved = (load_artifact(tmp_path / "out" / name) for name in ("first", "unmoved"))
    assert unmoved.digest == first.digest
    assert "already there, v1: " in printed


def test_lossy_policy(tmp_path: Path) -> None:
    """The certificate is shown, and consent is asked for."""
    printed = passes("lossy_policy.sh", tmp_path, NUM_PROMPTS="8", MAX_LOSS="0.5")
    assert "certified, chosen" in printed
    assert "pass --allow-lossy" in printed
    assert not load_artifact(tmp_path / "out" / "mars").policy.lossless
    rows = json.loads((tmp_path / "out" / "results" / "results.json").read_text())
    assert [row["policy"] for row in rows] == ["ar", "chain", str(tmp_path / "out" / "mars")]


def test_a_loss_that_the_prompts_cannot_certify_ends_the_example(tmp_path: Path) -> None:
    code, printed = run_example("lossy_policy.sh", tmp_path, NUM_PROMPTS="2", MAX_LOSS="0.01")
    assert (code, printed.count("== ")) == (4, 1), printed


def test_the_folder_is_listed_in_its_readme() -> None:
    page = (EXAMPLES / "README.md").read_text()
    listed = set(re.findall(r"\]\(([\w.]+)\)", page))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
