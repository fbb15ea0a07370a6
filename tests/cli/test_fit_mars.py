"""`specctl fit mars` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.train import mars
from tests.cli.command import passes, refuses, specctl, write_lines

OPTIONS = (
    "--shape",
    "chain",
    "--form",
    "prob_ratio",
    "--thetas",
    "0.5,0.2",
    "--max-new-tokens",
    12,
)
OPTIONS = (*OPTIONS, "--device", "cpu", "--batch-size", 8, "--limit", 8)


def fit(out: Path, *more: object) -> tuple[object, ...]:
    return ("fit", "mars", "embedded", "-o", out, *OPTIONS, *more)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mars") / "policy"
    shown = json.loads(passes(*fit(folder, "--max-loss", 0.3, "--json")).out)
    assert shown["report"]["num_checked"] == 8
    assert shown["report"]["chosen"] is not None
    assert shown["artifact_digest"].startswith("sha256:")
    return folder


def test_artifact_is_lossy_and_a_lossless_run_refuses_it(policy: Path) -> None:
    assert "LOSSY" in passes("show", policy).out
    run = ("run", "--policy", policy, "--limit", 1, "--max-new-tokens", 4, "--device", "cpu")
    run += ("--batch-size", 8)  # as it was measured
    assert "--allow-lossy" in refuses(2, *run)
    passes(*run, "--allow-lossy")


def test_finished_runs_are_resumed_and_never_mixed(policy: Path) -> None:
    again = fit(policy.with_name("again"), "--max-loss", 0.3, "--runs", f"{policy}.runs")
    assert "--resume" in refuses(2, *again)
    passes(*again, "--resume")
    other = (*again, "--resume", "--max-new-tokens", 13)
    assert "another max_new_tokens" in refuses(4, *other)


def test_a_contract_that_cannot_hold_writes_no_artifact(policy: Path) -> None:
    out = policy.with_name("refused")
    line = refuses(4, *fit(out, "--runs", f"{policy}.runs", "--resume", "--max-loss", 0.02))
    assert "114" in line
    assert not out.exists()
    assert (policy.with_name("policy.runs") / "report.json").exists()


def test_interrupted_fit_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = mars.run_prompts, []

    def interrupted(*args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(mars, "run_prompts", interrupted)
    outcome = specctl(*fit(tmp_path / "policy", "--max-loss", 0.3))
    assert outcome.code == 130
    [kept] = (tmp_path / "policy.runs").glob("*.jsonl")
    assert len(kept.read_text().splitlines()) == 8


def test_prompts_without_answers_are_refused(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "some.txt", "Hello", "Good morning")
    command = ("fit", "mars", prompts, "-o", tmp_path / "policy", *OPTIONS)
    assert "checkable answers" in refuses(4, *command)


def test_one_id_in_two_files_is_refused(tmp_path: Path) -> None:
    command = ("fit", "mars", "embedded", "embedded", "-o", tmp_path / "policy", *OPTIONS)
    assert "no other file" in refuses(4, *command)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--thetas", "0.2,0.5"), "strictest"),
        (("--mode", "code_v1", "--form", "ratio"), "temperature"),
        (("--num-seeds", 2), "--num-seeds"),
        (("--max-loss", 0), "max_loss"),
        (("--loss", "half"), "one-sided"),
        (("--shape", "triangle"), "triangle"),
    ],
    ids=str,
)
def test_options_out_of_range(options: tuple[object, ...], word: str, tmp_path: Path) -> None:
    assert word in refuses(2, *fit(tmp_path / "policy", *options))
    assert not (tmp_path / "policy.runs").exists()


def test_live_traces_do_not_screen(traces: Path, tmp_path: Path) -> None:
    line = refuses(4, *fit(tmp_path / "policy", "--traces", traces))
    assert "--dense" in line
