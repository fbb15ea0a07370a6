"""`specctl replay` and `show` of dense traces, and of a served batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.replay.cost.files import save_cost_model
from tests.cli.command import ARTIFACT, USAGE, passes, refuses, specctl, write_lines
from tests.logs.import_cases import vllm_log
from tests.replay.costs import table_model
from tests.replay.logs import random_traces
from tests.report.examples import drift_results


def replayed(folder: Path, *options: object) -> dict[str, Any]:
    found = specctl("replay", folder, *options, "--json")
    assert found.code == 0, found.err
    document: dict[str, Any] = json.loads(found.out)
    return document


def test_a_table_for_people(dense: Path) -> None:
    shown = passes("replay", dense, "-p", "ar", "-p", "eagle2:4x3/9").out
    assert "6 prompts, 768 tokens, greedy" in shown
    assert shown.startswith("Fewest calls: eagle2:4x3/9 ")
    assert "× is relative to ar" in shown


def test_json_for_scripts_and_a_file_of_the_same(dense: Path, tmp_path: Path) -> None:
    options = ("-p", "ar", "-p", "chain", "--baseline", "2", "-o", tmp_path / "out")
    document = replayed(dense, *options)
    assert document == json.loads((tmp_path / "out" / "replay.json").read_text())
    assert document["baseline"] == "chain"
    assert document["support"] == {"top_k": 3, "width": 3, "depth": 6, "nested": True}
    plain, chain = document["policies"]
    assert plain["pooled"]["calls"] == plain["pooled"]["num_tokens"] == 768
    calls = chain["pooled"]["against"]["calls"]
    assert calls == {"value": 1.0, "low": None, "high": None}, "six prompts have no interval"
    assert [figures["group"] for figures in chain["by_category"]] == ["arithmetic", "code", "prose"]


def test_what_the_log_lacks_is_said(dense: Path) -> None:
    """A figure that the log does not support is a range, and its row says why."""
    options = ("-p", "ar", "-p", "eagle2:8x3/12")
    _, deep = replayed(dense, *options)["policies"]
    found = passes("replay", dense, *options, "--wide").out
    [row] = [line for line in found.splitlines() if "eagle2:8x3/12*" in line]
    calls, tau = (deep["pooled"]["bounds"][name] for name in ("calls", "mean_acceptance_length"))
    assert f" {calls['low']:.0f} to {calls['high']:.0f} " in row
    assert f" {tau['low']:.2f} to {tau['high']:.2f} " in row
    lacking = f"{1 - deep['pooled']['expansion_support']:.1%} of the expansions that it wants"
    assert f"{deep['pooled']['censored_share']:.1%} of its rounds leave the log" in found
    assert f"/12: the log lacks {lacking} and " in found
    assert "; collect with --dense --depth 8, or take eagle2:6x3/12." in found
    held = passes("replay", dense, "-p", "eagle2:6x3/12", "--wide").out
    assert "*" not in held, "the step that the note names works"
    assert "[" not in row, "no interval where the figure itself is not known"
    first = passes("replay", dense, *options, "--baseline", 2).out
    assert "×" not in first.replace("nothing is compared", ""), "of a range no ratio is made"


def test_show_says_positions_of_dense_traces(dense: Path) -> None:
    shown = passes("show", dense).out
    assert "positions" in shown
    assert "whole path" in shown
    assert "τ" not in shown, "positions overlap: no acceptance length is read off them"


def test_a_cost_model_adds_times_and_says_whose_they_are(dense: Path, cost: Path) -> None:
    found = specctl("replay", dense, "-p", "ar", "--cost-model", cost, "--json")
    [plain] = json.loads(found.out)["policies"]
    assert plain["pooled"]["time_us"] == pytest.approx(768 * 1060.0)
    assert (
        json.loads(found.out)["clock"]
        == "the clock of made up (stated, not of this pair, decisions free)"
    )


def test_a_batch_that_was_not_measured_is_refused_before_the_log_is_read(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = tmp_path / "cost_model.json"
    save_cost_model(table_model(), clock)
    monkeypatch.setattr("specctl.replay.run.DenseLog.open", lambda *_: pytest.fail("the log"))
    found = specctl("replay", dense, "-p", "ar,chain", "--cost-model", clock, "--batch-size", 8)
    assert (found.code, found.out) == (USAGE, "")
    assert "measured up to batch size 3; 8 is larger" in found.err


def test_a_served_batch_with_a_budget_and_goodput(dense: Path, cost: Path, tmp_path: Path) -> None:
    budget = ("-p", "eagle2:3x3/8+survival:max_tokens=12")
    load = ("--batch-size", 3, "--cost-model", cost)
    options = ("-p", "ar", *budget, *load, "--tpot-limit-ms", 1)
    document = replayed(dense, *options, "-o", tmp_path)
    assert document == json.loads((tmp_path / "replay.json").read_text())
    plain, fixed = document["policies"]
    assert plain["steady"]["verified_per_step"]["value"] == pytest.approx(3)
    assert fixed["steady"]["verified_per_step"]["value"] < 12.001
    assert plain["steady"]["goodput_share"]["value"] == 0.0
    assert fixed["against"]["tokens_per_s"]["value"] > 1
    assert fixed["against"]["tokens_per_s"]["low"] is None, "six prompts have no interval"
    shown = " ".join(specctl("replay", dense, "-p", "ar", *load).out.split())
    assert "batch size 3, closed loop, greedy; 8 runs of 24 requests" in shown


def test_show_prints_results_that_verbs_wrote(cost: Path, tmp_path: Path) -> None:
    dense = tmp_path / "traces"
    random_traces(dense, num_prompts=16, depth=3, top_k=2)
    passes("ladder", dense, "-o", tmp_path / "l", "--cost-model", cost)
    passes("tune", dense, "-o", tmp_path / "t", "--cost-model", cost)
    replays: dict[str, tuple[object, ...]] = {
        "r": (),
        "serving": ("--batch-size", 3, "--cost-model", cost),
        "batch": ("--in-order",),
    }
    for place, options in replays.items():
        passes("replay", dense, "-p", "chain:2", "-o", tmp_path / place, *options)
    write_lines(tmp_path / "vllm.log", *vllm_log())
    passes("import", tmp_path / "vllm.log", "-o", tmp_path / "i")
    write_lines(tmp_path / "drift.json", json.dumps(drift_results().to_json()))
    again = ("recalibrate", dense, "-p", "chain:1", "--held-out", 0.5, "--cost-model", cost)
    told = passes(*again, "-o", tmp_path / "again").out
    assert told.startswith(passes("show", tmp_path / "again").out), "then what was written"
    results = [
        ("again", "again/recalibration.json"),
        ("drift.json", "drift.json"),
        ("l", "l/ladder.json"),
        ("t", "t/tune.json"),
        ("t/tune.json", "t/tune.json"),
        *[(place, f"{place}/replay.json") for place in replays],
        ("i", "i/summary.json"),
    ]
    for place, name in results:
        assert passes("show", tmp_path / place).out
        shown = json.loads(passes("show", tmp_path / place, "--json").out)
        assert shown == json.loads((tmp_path / name).read_text())
    assert "verify_fixed_us" in passes("show", cost).out
    assert "held-out prompts" in passes("show", tmp_path / "t").out
    assert json.loads(passes("show", "h100-llama-3.1-8b-eagle", "--json").out)["kind"]


def test_an_artifact_of_another_pair_and_a_lossy_policy(
    dense: Path, artifacts: dict[str, Path]
) -> None:
    """The log is of other models than the artifact: what to type stands in the refusal."""
    ask = ("replay", dense, "-p", artifacts["chain"])
    assert "--allow-mismatch" in refuses(ARTIFACT, *ask)
    found = specctl(*ask, "--allow-mismatch")
    assert found.code == 0
    assert found.err.startswith("warning: ")
    lossy = refuses(USAGE, "replay", dense, "-p", "chain+mars-paper")
    assert "specctl run --compare" in lossy
    assert "--allow-lossy" not in lossy
