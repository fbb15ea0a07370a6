"""`specctl fit gbdt` from the command line: artifact, report, replay of it, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import passes, refuses, specctl
from tests.train.node_cases import node_traces

QUICK = ("--num-trees", 12, "--num-leaves", 5, "--min-rows", 20, "--hidden", 4, "--min-steps", 1)
DRAFT = ("--features", "draft_logp,parent_entropy,depth", "--recall", 0.6, "--held-out", 0.4)
USAGE, INPUT = 2, 4


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log") / "log"
    node_traces(folder)
    return folder


@pytest.mark.parametrize("options", [(), ("--distill",)])
def test_fit_show_and_replay(options: tuple[str, ...], dense: Path, tmp_path: Path) -> None:
    fit = ("fit", "gbdt", dense, "-o", tmp_path / "policy", *QUICK, *DRAFT, *options)
    found = json.loads(passes(*fit, "--json").out)
    assert found["report"]["config"]["nodes"]["negatives"] == 0.0
    assert (found["report"]["fidelity"] is not None) == bool(options)
    assert found["artifact_digest"] in passes("show", tmp_path / "policy").out
    replayed = specctl("replay", dense, "-p", tmp_path / "policy", "-p", "ar", "--json")
    assert replayed.code == 0, replayed.err
    shown = passes(*fit).out
    assert "gain by feature" in shown
    assert "wrote" in shown


def test_live_traces_lack_the_text(traces: Path, tmp_path: Path) -> None:
    """The default features compare with it."""
    assert "dense" in refuses(INPUT, "fit", "gbdt", traces, "-o", tmp_path / "policy", *QUICK)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--num-trees", "0", "num_trees"),
        ("--num-leaves", "64", "num_leaves"),
        ("--shrinkage", "0", "lr"),
        ("--hidden", "49", "hidden"),
        ("--beta", "1.5", "beta"),
        ("--beta", "1.0", "beta 1: expected a threshold that some node reaches"),
        ("--features", "draft_logp,colour", "--features"),
        ("--predicts", "luck", "predicts"),
        ("--depth", "12", "--depth: expected at most 4"),
        ("--negatives", "-1", "negatives"),
    ],
)
def test_options_out_of_range(
    option: str, value: str, says: str, dense: Path, tmp_path: Path
) -> None:
    out = tmp_path / "policy"
    assert says in refuses(USAGE, "fit", "gbdt", dense, "-o", out, *QUICK, *DRAFT, option, value)
    assert not out.exists()


def test_interrupted_fit_writes_nothing(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specctl.train.gbdt.boost", interrupted)
    outcome = specctl("fit", "gbdt", dense, "-o", tmp_path / "policy", *QUICK, *DRAFT)
    assert outcome.code == 130
    assert not (tmp_path / "policy").exists()
