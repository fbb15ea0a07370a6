"""`specctl fit c2t` from the command line: artifact, report, replay of it, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import passes, refuses, specctl
from tests.train.node_cases import node_traces

QUICK = ("--epochs", 2, "--min-steps", 1, "--hidden", 4, "--batch-size", 256, "--held-out", 0.4)
USAGE, INPUT = 2, 4


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "log"
    node_traces(folder)
    return folder


def test_fit_show_and_replay(dense: Path, tmp_path: Path) -> None:
    fit = ("fit", "c2t", dense, "-o", tmp_path / "policy", *QUICK, "--recall", 0.6)
    found = json.loads(passes(*fit, "--json").out)
    config = found["report"]["config"]["nodes"]
    assert config["features"] == ["draft_logp", "parent_entropy", "depth"]
    assert (config["depth"], config["first_top_k"], config["second_top_k"]) == (4, 3, 3)
    assert found["artifact_digest"] in passes("show", tmp_path / "policy").out
    replayed = specctl("replay", dense, "-p", tmp_path / "policy", "-p", "ar", "--json")
    assert replayed.code == 0, replayed.err
    shown = passes(*fit).out
    assert "wrote" in shown
    assert "held-out prompts" in shown


def test_paper_mode_and_study(dense: Path, tmp_path: Path) -> None:
    options = ("--predicts", "joint", "--no-keep-leaves", "--study", "--recall", 0.6, "--json")
    found = json.loads(passes("fit", "c2t", dense, "-o", tmp_path / "p", *QUICK, *options).out)
    assert found["report"]["config"]["nodes"]["features"] == [
        "joint_prob",
        "parent_entropy",
        "depth",
    ]
    assert found["report"]["config"]["keep_leaves"] is False
    assert len(found["report"]["study"]["ablation"]) == 7


def test_live_traces_serve_too(traces: Path, tmp_path: Path) -> None:
    """Recorded by the static tree of 6 levels and 8 children, which becomes the policy's."""
    options = (*QUICK, "--recall", 0.5, "--json")
    found = json.loads(passes("fit", "c2t", traces, "-o", tmp_path / "policy", *options).out)
    config = found["report"]["config"]["nodes"]
    assert (config["depth"], config["first_top_k"]) == (6, 8)
    assert found["report"]["sides"]["train"]["num_accepted"] > 0


def test_live_traces_without_accepted_nodes(blind_traces: Path, tmp_path: Path) -> None:
    line = refuses(INPUT, "fit", "c2t", blind_traces, "-o", tmp_path / "policy")
    assert "expected accepted and rejected draft tokens, found 0 accepted" in line


def test_one_prompt(perfect_traces: Path, tmp_path: Path) -> None:
    line = refuses(INPUT, "fit", "c2t", perfect_traces, "-o", tmp_path / "policy")
    assert "at least 2 prompts" in line


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--hidden", "1", "hidden"),
        ("--hidden", "49", "hidden"),
        ("--beta", "1.5", "beta"),
        ("--beta", "1.0", "beta 1: expected a threshold that some node reaches"),
        ("--recall", "0", "recall"),
        ("--features", "joint_prob,colour", "--features"),
        ("--predicts", "luck", "predicts"),
        ("--depth", "12", "--depth: expected at most 4"),
        ("--lr", "2", "lr"),
        ("--held-out", "1", "held_out"),
        ("--negatives", "-1", "negatives"),
        ("--num-tokens", "1", "num_tokens"),
        ("--max-rows", "5", "max_rows"),
    ],
)
def test_options_out_of_range(
    option: str, value: str, says: str, dense: Path, tmp_path: Path
) -> None:
    out = tmp_path / "policy"
    assert says in refuses(USAGE, "fit", "c2t", dense, "-o", out, *QUICK, option, value)
    assert not out.exists()


def test_study_with_a_given_beta(dense: Path, tmp_path: Path) -> None:
    arguments = ("fit", "c2t", dense, "-o", tmp_path / "p", "--study", "--beta", 0.1)
    assert "--study with --beta" in refuses(USAGE, *arguments)


def test_text_features_need_dense_traces(traces: Path, tmp_path: Path) -> None:
    arguments = ("fit", "c2t", traces, "-o", tmp_path / "p", "--features", "suffix_length,depth")
    assert "dense" in refuses(INPUT, *arguments)


def test_interrupted_fit_writes_nothing(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specctl.train.c2t.train_ffn", interrupted)
    outcome = specctl("fit", "c2t", dense, "-o", tmp_path / "policy", *QUICK)
    assert outcome.code == 130
    assert "interrupted" in outcome.err
    assert not (tmp_path / "policy").exists()
