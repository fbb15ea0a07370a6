"""SpecDecode-Bench's speed-ups against a loop that steps through each request as its simulator;
imports in one call, by the labels of tables, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.command import INPUT, USAGE, passes, refuses, specctl
from tests.logs.import_cases import request, write_rows

RATES = {
    "verify_fixed_us": 5000.0, "verify_token_us": 40.0, "verify_cached_token_us": 0.25,
    "draft_fixed_us": 900.0, "draft_token_us": 0.0, "draft_cached_token_us": 0.05, "step_us": 300.0,
}  # fmt: skip
"""The drafter's own tokens cost nothing: the simulator counts those of one request, we all."""
COST = {"kind": "linear", "cost_model_version": 1, "source": "made up", **RATES}
DEPTH = 6


def rows() -> list[dict[str, Any]]:
    """Twelve requests whose rates differ, so that means of rates are not rates of sums."""
    random, found = np.random.default_rng(7), []
    for name in range(12):
        size = int(random.integers(60, 400))
        accepted = random.binomial(DEPTH, 0.1 + 0.07 * name, size)
        entries = 1 + np.minimum(accepted, np.maximum(size - 1 - np.arange(size), 0))
        prompt = int(random.integers(5, 900))
        found.append(request(str(name), size, prompt, eagle=entries.tolist()))
    return found


def simulated(row: dict[str, Any], batch_size: int, length: int | None) -> float:
    """Tokens per us of copies of a request; a length of 0 is plain decoding, None the oracle."""
    entries, prompt = row["acc_eagle"]["acc_len"], len(row["prompt_token_ids"])
    num_tokens, now = len(row["generated_token_ids"]), 1

    def forward(tokens: int, cached: int) -> float:
        fixed = RATES["verify_fixed_us"] + RATES["step_us"]
        return fixed + batch_size * (
            tokens * RATES["verify_token_us"] + cached * RATES["verify_cached_token_us"]
        )

    spent = forward(prompt, 0)
    while now < num_tokens:
        emits = entries[now - 1]  # `next`: the entry before the position
        size = emits if length is None else length + 1
        spent += forward(size, prompt + now - 1)
        if length != 0:
            cached = batch_size * (prompt + now - 1)
            spent += RATES["draft_fixed_us"] + cached * RATES["draft_cached_token_us"]
        now += min(emits, size)
    return batch_size * num_tokens / spent


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peer")
    source = write_rows(folder / "log.jsonl", *rows())
    passes("import", source, "-o", folder / "log", "--entry-predicts", "next")
    (folder / "cost.json").write_text(json.dumps(COST))
    return folder / "log"


@pytest.mark.parametrize("batch_size", [1, 32])
def test_speed_ups_are_those_of_the_simulator(log: Path, batch_size: int) -> None:
    policies = {"ar": 0, **{f"chain:num_draft_tokens={k}": k for k in (1, 3, 5)}, "oracle": None}
    words = [word for policy in policies for word in ("-p", policy)]
    options = ("--definition", "specdecode-bench", "--batch-size", batch_size, "--json")
    cost = ("--cost-model", log.parent / "cost.json")
    found = json.loads(specctl_out("replay", log, *words, *options, *cost))
    assert (found["kind"], found["num_requests"]) == ("replay-peer", 12)
    plain = np.mean([simulated(row, batch_size, 0) for row in rows()])
    for length, figures in zip(policies.values(), found["policies"], strict=True):
        rate = np.mean([simulated(row, batch_size, length) for row in rows()])
        assert figures["speed_up"]["value"] == pytest.approx(rate / plain, rel=2e-3)
        assert figures["tokens_per_s"]["value"] == pytest.approx(1e6 * rate, rel=2e-3)
    own = json.loads(specctl_out("replay", log, "-p", "ar", "-p", "oracle", *cost, "--json"))
    ratio = 1 / own["policies"][1]["pooled"]["against"]["time_us"]["value"]
    assert abs(ratio - found["policies"][-1]["speed_up"]["value"]) > 0.05, "it is another figure"


def specctl_out(*words: object) -> str:
    """What a command prints, its warning of stated costs aside."""
    outcome = specctl(*words)
    assert outcome.code == 0, outcome
    return outcome.out


def test_a_definition_needs_an_import_and_times(log: Path, tmp_path: Path) -> None:
    asked = ("-p", "ar", "--definition", "specdecode-bench")
    assert "--cost-model, whose times it weighs" in refuses(USAGE, "replay", log, *asked)
    assert "leave --in-order out" in refuses(USAGE, "replay", log, *asked, "--in-order")
    assert "expected a folder" in refuses(INPUT, "replay", tmp_path, *asked)


def test_several_imports_are_replayed_each_by_itself(log: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", *rows()[:9])
    passes("import", other, "-o", tmp_path / "other")
    words = ("replay", log, tmp_path / "other", "-p", "ar", "-p", "eagle/oracle")
    first, second = json.loads(passes(*words, "-o", tmp_path / "out", "--json").out)
    assert [one["source"]["name"] for one in (first, second)] == ["log.jsonl", "other.jsonl"]
    assert [one["policy"] for one in first["policies"]] == ["ar", "eagle/oracle"]
    assert json.loads((tmp_path / "out" / "other" / "replay.json").read_text()) == second
    assert "different names" in refuses(USAGE, *words, log, "-o", tmp_path / "out")


def test_imports_load_no_torch(log: Path, tmp_path: Path) -> None:
    """Torch takes longer to load than an import to read or to replay."""
    linear = ",".join(f"{name}={value}" for name, value in RATES.items())
    source, out = log.parent / "log.jsonl", tmp_path / "again"
    commands = [
        ["import", source, "-o", out, "--linear", linear, "--entry-predicts", "next"],
        ["replay", log, "-p", "ar,chain:num_draft_tokens=9,oracle"],
        ["replay", log, "-p", "ar,chain", "--batch-size", 4, "--engine", "vllm"],
        ["show", log],
    ]
    script = (
        "import sys; from specctl.cli import main\n"
        f"for words in {[[str(word) for word in words] for words in commands]!r}:\n"
        "    sys.argv = ['specctl', *words]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert not ended.code, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
