"""`specctl fit ...` as a user calls it: artifact, report, replay of it, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from specctl.artifacts import load_artifact, save_artifact
from specctl.policy import ElasticBudget, EntropyStop, JensenShannon
from specctl.train import certify
from tests.artifacts.examples import ORIGIN, POLICIES
from tests.cli.command import INPUT, USAGE, passes, refuses, specctl, write_lines

C2T = ("--epochs", 2, "--min-steps", 1, "--hidden", 4, "--nodes-per-step", 256, "--held-out", 0.4)
MARS = ("--shape", "chain", "--form", "prob_ratio", "--thetas", "0.5,0.2", "--max-new-tokens", 12,
        "--device", "cpu", "--batch-size", 8, "--limit", 8)  # fmt: skip


@pytest.mark.parametrize("options", [(), ("--predicts", "joint", "--no-keep-leaves")])
def test_a_scorer_is_fitted_shown_and_replayed(
    options: tuple[str, ...], nodes: Path, tmp_path: Path
) -> None:
    fit = ("fit", "c2t", nodes, "-o", tmp_path / "policy", *C2T, "--recall", 0.6, *options)
    found = json.loads(passes(*fit, "--json").out)
    config = found["report"]["config"]
    sizes = [config["nodes"][name] for name in ("depth", "first_top_k", "second_top_k")]
    assert sizes == [4, 3, 3], "as much as the traces hold"
    assert config["nodes"]["negatives"] == 10.0
    assert found["report"]["references"].keys() == {"boosted trees", "drafter"}
    first = "joint_prob" if "joint" in options else "draft_logp"
    assert config["nodes"]["features"] == [first, "parent_entropy", "depth"]
    assert config["keep_leaves"] == ("--no-keep-leaves" not in options)
    assert found["artifact_digest"] in passes("show", tmp_path / "policy").out
    replayed = specctl("replay", nodes, "-p", tmp_path / "policy", "-p", "ar", "--json")
    assert replayed.code == 0, replayed.err
    if not options:
        shown = passes(*fit).out
        assert "wrote" in shown
        assert re.match("Keeps|These scores", shown), "the verdict comes first"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cart", ("--filter", "all", "--label", "accepted"), "Bins"),
        ("c2t", (*C2T, "--recall", 0.4), "Expands at most 1 node a level; the traces hold 100"),
        ("c2t", (*C2T, "--recall", 0.9), "Replay gives ranges for it: collect with a larger"),
        ("survival", (), " a level; the traces hold "),
        ("echo", ("--min-rows", 5), "Levels"),
    ],
    ids=str,
)
def test_the_log_holds_what_a_fit_to_it_drafts(
    name: str, options: tuple[object, ...], says: str, dense: Path, tmp_path: Path
) -> None:
    """With its own sizes, also where its scores order nodes badly; or the fit says so."""
    ended = specctl("fit", name, dense, "-o", tmp_path / "policy", *options)
    assert ended.code == 0, ended.err
    assert says in ended.out
    words = ("-p", tmp_path / "policy", "--all-prompts", "--json")
    row = json.loads(specctl("replay", dense, *words).out)["policies"][-1]["pooled"]
    assert row["is_marked"] == ("ranges" in ended.out), row


def test_live_traces_serve_too(traces: Path, tmp_path: Path) -> None:
    """Recorded by the static tree of 6 levels and 8 children, which becomes the policy's."""
    out = tmp_path / "policy"
    found = json.loads(passes("fit", "c2t", traces, "-o", out, *C2T, "--recall", 0.5, "--json").out)
    config = found["report"]["config"]["nodes"]
    assert (config["depth"], config["first_top_k"]) == (6, 8)


def test_a_clip_is_certified(sums: Path, tmp_path: Path) -> None:
    out, runs = tmp_path / "both", tmp_path / "runs"
    options = ("--clips", "0.2,0.4", "--min-samples", 2, "--max-new-tokens", 8, "--device", "cpu")
    easy = ("--max-loss", 0.6, "--confidence", 0.5, "--runs", runs)
    passes("fit", "adasd", sums, "-o", out, *options, *easy)
    policy = load_artifact(out).policy
    assert isinstance(policy.shape, EntropyStop)
    assert isinstance(policy.acceptance, JensenShannon)
    assert policy.acceptance.max_threshold in (0.2, 0.4)
    assert policy.acceptance.min_samples == 2
    assert len([*runs.glob("*.jsonl")]) == 3, "strict, and a file a clip"


def fit_mars(out: Path, *more: object) -> tuple[object, ...]:
    return ("fit", "mars", "embedded", "-o", out, *MARS, *more)


@pytest.fixture(scope="module")
def relaxed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mars") / "policy"
    shown = json.loads(passes(*fit_mars(folder, "--max-loss", 0.3, "--json")).out)
    assert shown["report"]["num_checked"] == 8
    assert shown["report"]["chosen"] is not None
    assert shown["report"]["config"]["deny_token_ids"], "special tokens are always denied"
    assert shown["artifact_digest"].startswith("sha256:")
    return folder


def test_the_artifact_is_lossy_and_a_lossless_run_refuses_it(relaxed: Path) -> None:
    assert "LOSSY" in passes("show", relaxed).out
    run = ("run", "--policy", relaxed, "--limit", 1, "--max-new-tokens", 4, "--device", "cpu")
    run += ("--batch-size", 8)  # as it was measured
    assert "--allow-lossy" in refuses(2, *run)
    passes(*run, "--allow-lossy")


def test_finished_runs_are_resumed_and_never_mixed(relaxed: Path) -> None:
    again = fit_mars(relaxed.with_name("again"), "--max-loss", 0.3, "--runs", f"{relaxed}.runs")
    assert "--resume" in refuses(USAGE, *again)
    answered = [path.stat().st_mtime_ns for path in Path(f"{relaxed}.runs").glob("*.jsonl")]
    passes(*again, "--resume")
    now = [path.stat().st_mtime_ns for path in Path(f"{relaxed}.runs").glob("*.jsonl")]
    assert answered == now
    other = (*again, "--resume", "--max-new-tokens", 13)
    assert "another max_new_tokens" in refuses(INPUT, *other)


def test_an_interrupted_sweep_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., object] = certify.run_prompts
    calls = []

    def interrupted(*args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(certify, "run_prompts", interrupted)
    outcome = specctl(*fit_mars(tmp_path / "policy", "--max-loss", 0.3))
    assert outcome.code == 130
    [kept] = (tmp_path / "policy.runs").glob("*.jsonl")
    assert len(kept.read_text().splitlines()) == 8


def test_echos_budget_is_fitted_to_a_clock(nodes: Path, tmp_path: Path) -> None:
    small = ("--depth", 4, "--width", 2, "--max-width", 3, "--delta", 0.5, "--min-rows", 5)
    fit = ("fit", "echo", nodes, *small, "--num-tokens", 60, "--batch-size", 8, "-o")
    assert "--max-tokens" in refuses(USAGE, *fit, tmp_path / "policy"), "no clock to fit it to"
    clock = ("--cost-model", "h100-llama-3.1-8b-eagle")
    out = specctl(*fit, tmp_path / "policy", *clock).out
    budget = load_artifact(tmp_path / "policy").policy.budget
    assert isinstance(budget, ElasticBudget)
    assert budget.max_tokens in (280, 281)  # 5886 us and a little for the context, over 21.0
    assert f"K_max {budget.max_tokens} of batches of 8" in out
    given = specctl(*fit, tmp_path / "given", *clock, "--max-tokens", 64).out
    assert "K_max" not in given, "what is given is not fitted"


@pytest.mark.parametrize("kind", POLICIES)
def test_show_prints_every_kind_of_artifact(kind: str, tmp_path: Path) -> None:
    """In words, which `specctl` of tests checks; a file of an artifact shows the whole."""
    save_artifact(tmp_path / "policy", POLICIES[kind], ORIGIN, card=f"# {kind}\n")
    whole = passes("show", tmp_path / "policy", "--wide").out
    for file in (tmp_path / "policy").iterdir():
        assert passes("show", file, "--wide").out == whole


def test_show_prints_answers_that_a_fit_judged(tmp_path: Path) -> None:
    write_lines(tmp_path / "runs.json", '{"runs_version": 1}')
    write_lines(tmp_path / "a.jsonl", "{}", "{}")
    write_lines(tmp_path / "b.jsonl", "{}")
    assert passes("show", tmp_path).out.startswith("3 answers in 2 files, one a policy: the same")
