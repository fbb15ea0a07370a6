"""`specctl fit adasd` from dense chains of the embedded pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.artifacts import load_artifact
from specctl.policy.records import EntropyStop, JensenShannon
from tests.cli.command import passes, refuses, specctl, write_lines
from tests.cli.statuses import INPUT, USAGE

DRAFTED = ("--depth", 6, "--top-k", 1, "--max-new-tokens", 24)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough tokens for two means: 24 prompts of 24 tokens."""
    folder = tmp_path_factory.mktemp("adasd")
    lines = (
        f"Tom has {n} pens and buys {n + 3} more. How many pens has he now?" for n in range(24)
    )
    prompts = write_lines(folder / "prompts.txt", *lines)
    options = ("--dense", *DRAFTED, "--batch-size", 8, "--device", "cpu")
    passes("collect", prompts, "-o", folder / "traces", *options)
    return folder / "traces"


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts whose answers can be checked."""
    records = (
        json.dumps({"prompt_id": f"s{n}", "turns": [f"What is {n} + {n}?"], "answer": str(2 * n)})
        for n in range(4)
    )
    return write_lines(tmp_path_factory.mktemp("prompts") / "sums.jsonl", *records)


FIT = ("--held-out", 0.3, "--weights", "0,8")


def test_without_prompts_it_fits_the_lossless_stop(dense: Path, tmp_path: Path) -> None:
    told = json.loads(passes("fit", "adasd", dense, "-o", tmp_path / "stop", *FIT, "--json").out)
    artifact = load_artifact(tmp_path / "stop")
    assert told["artifact_digest"] == artifact.digest
    assert isinstance(artifact.policy.shape, EntropyStop)
    assert artifact.policy.shape.window == 6
    assert artifact.policy.lossless
    assert told["report"]["clip"] is None
    assert len(told["report"]["stop"]["rows"]) >= 5
    text = passes("fit", "adasd", dense, "-o", tmp_path / "again", *FIT).out
    assert "the artifact is lossless" in text
    assert "gen-only" in passes("show", tmp_path / "stop").out.lower() or artifact.policy.lossless
    ran = passes("run", "embedded", "--policy", tmp_path / "stop", "--limit", 1,
                 "--max-new-tokens", 8, "--device", "cpu")  # fmt: skip
    assert ran.out


def test_with_prompts_it_certifies_a_clip_and_goes_on_where_it_stopped(
    dense: Path, sums: Path, tmp_path: Path
) -> None:
    out, runs = tmp_path / "both", tmp_path / "runs"
    paired = ("--prompts", sums, "--clips", "0.2,0.4", "--max-new-tokens", 16, "--device", "cpu")
    easy = ("--max-loss", 0.6, "--confidence", 0.5, "--runs", runs)
    passes("fit", "adasd", dense, "-o", out, *FIT, *paired, *easy)
    policy = load_artifact(out).policy
    assert isinstance(policy.acceptance, JensenShannon)
    assert policy.acceptance.max_threshold in (0.2, 0.4)
    assert not policy.lossless
    answered = sorted(path.stat().st_mtime_ns for path in runs.glob("*.jsonl"))
    assert len(answered) == 3, "strict, and a file a clip"
    again = ("fit", "adasd", dense, "-o", tmp_path / "again", *FIT, *paired, *easy)
    assert "--resume" in refuses(USAGE, *again)
    passes(*again, "--resume")
    assert answered == sorted(path.stat().st_mtime_ns for path in runs.glob("*.jsonl"))


def test_a_contract_that_four_prompts_cannot_keep_is_refused(
    dense: Path, sums: Path, tmp_path: Path
) -> None:
    paired = ("--prompts", sums, "--clips", "0.2", "--max-new-tokens", 8, "--device", "cpu")
    line = refuses(INPUT, "fit", "adasd", dense, "-o", tmp_path / "out", *FIT, *paired)
    assert "fresh prompts" in line
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.runs" / "report.json").is_file(), "what was seen is kept"


def test_bad_input(dense: Path, traces: Path, prompts: Path, sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "at most 6" in refuses(USAGE, "fit", "adasd", dense, "-o", out, "--window", 7)
    assert "--dense" in refuses(INPUT, "fit", "adasd", traces, "-o", out)
    other = ("--prompts", sums, "--drafter", "embedded:small", "--device", "cpu")
    assert "the traces' pair" in refuses(INPUT, "fit", "adasd", dense, "-o", out, *FIT, *other)
    unchecked = ("--prompts", prompts, "--clips", "0.2", "--max-new-tokens", 4, "--device", "cpu")
    line = refuses(INPUT, "fit", "adasd", dense, "-o", out, *FIT, *unchecked)
    assert "checkable" in line
    assert specctl("fit", "adasd", dense, "-o", out, "--between", "mean").code == USAGE
