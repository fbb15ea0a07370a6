"""The study of the systems on random traces: figures beside replay's own, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_systems
from benchmarks.systems import page
from benchmarks.systems.figures import Figures, Side, every_static
from scripts.pages import interval
from specctl.logs.tree_log import DenseLog
from specctl.policy import EntropyBins, JointThreshold, Policy, RootOnly, Shape, StaticTree
from specctl.replay.cost.files import load_cost_model
from specctl.replay.metrics import LoadClock
from specctl.replay.rounds import replay
from tests.replay.logs import random_traces

CLOCKS = {"line": load_cost_model(Path("line"))}
BASE = StaticTree(depth=5, top_k=4, num_tokens=12)
FITS: dict[str, list[Shape]] = {
    "threshold": [JointThreshold(depth=5, top_k=4)],
    "HeteroSpec": [EntropyBins(base=BASE, edges=(one, 3.0)) for one in (1.0, 2.0)],
}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """Settings are chosen and measured on the same prompts."""
    folder = tmp_path_factory.mktemp("dense") / "traces"
    random_traces(folder, num_prompts=8, nested=False)
    side = Side.open(folder, CLOCKS)
    return Figures.of(side, side)


def time_a_token(side: Side, shape: Shape) -> float:
    [run] = replay(DenseLog.open(side.traces), [Policy(shape=shape)], with_bounds=False)
    return float(LoadClock(CLOCKS["line"])(run).sum() / run.emitted.sum())


def test_the_fastest_static_setting_is_the_base_of_all_times(figures: Figures) -> None:
    static, *others = figures.times(FITS)
    times = {
        one.model_dump_json(): time_a_token(figures.side, one)
        for one in every_static(figures.side.log)
    }
    least, plain = min(times.values()), times[RootOnly().model_dump_json()]
    assert static["over_plain"]["value"] == pytest.approx(plain / least - 1)
    assert [row["family"] for row in others] == list(FITS)
    assert [len(row["time"]["by_fit"]) for row in others] == [1, 2]
    for row in others:
        found = interval(row["time"])
        assert found.low <= found.value <= found.high
        assert found.value == pytest.approx(sum(row["time"]["by_fit"]) / len(row["time"]["by_fit"]))


def test_static_trees_cost_nothing_over_themselves(figures: Figures) -> None:
    """At each of their sizes; where a smaller tree of a resample reaches as much, it counts."""
    side = figures.side
    curve = [StaticTree(depth=5, top_k=4, num_tokens=n) for n in (6, 9, 12, 16)]
    for control in curve[1:]:
        one = figures.drawn([control])[:, 0]
        at = figures._tokens_at(figures.drawn(curve), side.tau(one))
        assert at[0] == pytest.approx(side.tokens_a_call(one)[0])
        assert (at <= side.tokens_a_call(one) * (1 + 1e-9)).all()


def test_papers_settings_over_what_they_start_from(figures: Figures) -> None:
    """A system that is its own baseline changes nothing."""
    [row] = figures.presets({"chain": [bench_systems.UNFITTED["AdaSD's stop"]]})
    assert row["baseline"] == "chain:5"
    [same] = figures.presets({"EAGLE-3": [StaticTree(depth=8, top_k=10, num_tokens=60)]})
    assert {one["value"] for one in same["change"].values()} == {0.0}
    assert same["support"] < 1, "the log's trees have 5 levels and 4 children"


def test_the_page(figures: Figures) -> None:
    """Sentences and cells have the figures; the block stands between its markers."""
    gain = {"value": 1.2, "low": 1.1, "high": 1.3}
    ladder = {"plain": gain, "features": gain, "headroom": {"value": 0.3, "low": 0.2, "high": 0.4}}
    comparison = {"num_checked": 120, "accuracy": 0.05, "strict_accuracy": 0.04, "lost": 1}
    comparison |= {"gained": 2, "speedup": gain, "diverged": gain, "setting": 0.9, "needed": 300}
    result: dict[str, Any] = {
        "times": [*figures.times(FITS)],
        "presets": [*figures.presets({"AdaSD's stop": [bench_systems.UNFITTED["AdaSD's stop"]]})],
        "equal_depth": [*figures.equal_depth({"threshold": FITS["threshold"]})],
        "prompts": dict.fromkeys(("choose", "measure"), page.counts(figures.side)),
        "left_out": ["ECHO"],
        "ladders": {"line": ladder | {"static": "chain", "setting": "3"}},
        "lossy": {"MARS": comparison | {"trial": {"certified": False}}, "AdaSD": None},
        "clocks": {"line": page.clock_facts(CLOCKS["line"])},
        "options": {"tokens": 64, "fits": 2},
        "device": "a CPU",
        "num_cpus": 2,
        "target": "t",
        "head": "h",
    }
    shown = page.block(json.loads(json.dumps(result)))
    text = " ".join(shown.split())
    assert page.percent(result["times"][1]["time"]) in text
    assert "can have there is +30.0 % [+20.0, +40.0]" in text
    assert "| line | chain, 3 | +20.0 % [+10.0, +30.0] |" in text
    assert "of 120, strictly 4.0% (1 lost, 2 gained)" in text
    assert "The fit of ECHO refuses these traces." in text
    assert "AdaSD: not judged, since too few questions" in text
    assert "2 % is not certified (about 300 prompts would decide)" in text
    written = page.written(page.PAGE.read_text("utf-8"), result)
    assert f"\n{shown}\n" in written
    assert page.written(written, result) == written
