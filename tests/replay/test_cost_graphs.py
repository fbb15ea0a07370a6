"""Profiling captured rounds: the runtime's own, through a tape or uncaptured, and their padding."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.predicted_time import predict
from specctl.errors import InputError, UsageError
from specctl.policy import Chain, RootOnly, StaticTree
from specctl.replay.cost import CostModel, load_cost_model
from specctl.replay.cost.files import check_rounds
from specctl.replay.cost.model import Steps
from specctl.replay.cost.probe import RoundProbe, RoundSamples, TreeShape
from specctl.replay.cost.profile import parse_rounds, profile, timed_rounds
from specctl.runtime.capture import GraphSettings, Recording, bucket_of, token_tiers
from tests.cli.command import passes, refuses
from tests.replay.costs import MACHINE, SMALL, grid, table_model, table_record, toy
from tests.replay.profiling import QUICK, VirtualTime, run_live
from tests.runtime.tape import TapeCapture


class ChargingTape(TapeCapture):
    """Replays take the virtual time that the recorded work took."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self.clock = clock

    def record(self, function: Any) -> Recording:
        began = self.clock.now_us
        recording = super().record(function)
        spent_us, self.clock.now_us = self.clock.now_us - began, began

        def replay() -> None:
            self.clock.now_us += spent_us
            recording.replay()

        return recording._replace(replay=replay)


@pytest.fixture(scope="module")
def charged() -> tuple[Any, VirtualTime, CostModel]:
    """A pair whose target takes 1,000 us a token and whose drafter takes 300, and its profile."""
    clock, pair = VirtualTime(), toy()
    clock.charge(pair.target.model, 1000)
    clock.charge(pair.drafter.model, 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", clock)
        return pair, clock, profile(pair, SMALL, graphs=GraphSettings(capture=ChargingTape(clock)))


def test_a_known_cost_is_found_where_it_is(charged: Any) -> None:
    record, few = charged[2].record, 12.0
    assert record.rounds == "graphs"
    assert record.token_tiers == (64, 128, 256, 512, 1024, 2048)
    verify = 1000 * np.array([[1, 4, 8], [2, 8, 16]])
    assert np.array(record.verify.us)[:, 0] == pytest.approx(verify, abs=few)
    level = 300 * np.array([[1, 3], [2, 6]])
    assert np.array(record.draft.level.us)[:, 0] == pytest.approx(level, abs=few)
    assert record.draft.extend.sizes == (2, 4, 5, 9)  # as deep as the trees, and one more
    extend = 300 * np.array([[2, 4, 5, 9], [4, 8, 10, 18]])
    assert np.array(record.draft.extend.us)[:, 0] == pytest.approx(extend, abs=few)
    for part in (record.loop, record.draft.loop, record.draft.root, record.draft.select):
        assert 0 < np.max(part.us) <= few
    assert all(error.worst < 0.01 for error in record.held_out.values())


SHAPES = [
    RootOnly(),
    Chain(num_draft_tokens=2),
    StaticTree(depth=3, top_k=3, num_tokens=10),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_live_graph_rounds_take_what_was_predicted(
    shape: Any, batch_size: int, charged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the virtual clock nothing is noise. A table of the ordinary loop's rounds is off by what
    drafters read: as many tokens as a tree is deep, after last rounds too."""
    pair, clock, model = charged
    monkeypatch.setattr(time, "perf_counter", clock)
    began = clock.now_us
    recorder, prompts, _ = run_live(
        pair, shape, batch_size, GraphSettings(capture=ChargingTape(clock))
    )
    wall_us = clock.now_us - began
    drafts = not isinstance(shape, RootOnly)
    found = predict(model, recorder.steps(), prompts, drafts=drafts)
    assert found.wall_us == pytest.approx(wall_us, rel=0.005)


def test_a_probe_replays_what_it_captured_and_leaves_the_batch_where_it_was() -> None:
    pair, samples, tape = toy(), RoundSamples(), TapeCapture()
    tree = TreeShape(3, 8)
    with torch.inference_mode():
        probe = RoundProbe(pair, 2, 16, [tree], (1,), 4, GraphSettings(capture=tape))
        before = pair.target.model.cache.storage[..., :16, :].clone()
        probe.run(tree, samples)
        assert len(tape.num_launches) == 4 + 3  # levels; selection, verification, commit
        probe.run(None, samples)
        assert len(tape.num_launches) == 4 + 3 + 3  # no levels
        after = pair.target.model.cache.storage[..., :16, :]
    assert torch.equal(before, after)
    assert {point: len(us) for point, us in samples.verify.by_point.items()} == {
        (2, 16, 8): 4,
        (2, 16, 1): 4,
    }
    assert len(samples.level.by_point[2, 16, 3]) == 3 * 4
    assert set(samples.extend.by_point) == {(2, 16, 5)}


def test_a_capture_that_fails_is_no_measurement(caplog: pytest.LogCaptureFixture) -> None:
    """Its part would run eagerly, which nobody asked to have timed."""
    caplog.set_level(logging.CRITICAL)
    settings = GraphSettings(capture=TapeCapture(fails=1))
    with torch.inference_mode():
        probe = RoundProbe(toy(), 1, 8, [], (1,), 1, settings)
        with pytest.raises(UsageError, match=r"captured.*found 1 that failed.*--rounds ordinary"):
            probe.run(None, RoundSamples())


def test_a_profile_through_a_tape_is_whole() -> None:
    ticks: list[int] = []
    settings = GraphSettings(capture=TapeCapture(), flat_tokens=8)
    points = replace(SMALL, batch_sizes=(1,), context_tokens=(8,))
    model = profile(toy(), points, graphs=settings, on_step=lambda: ticks.append(1))
    assert len(ticks) == points.num_steps
    assert model.record.num_samples >= 3
    assert model.record.token_tiers[:3] == (8, 16, 32)
    assert model.record.draft.loop.us[0][0][0] > 0


SLOPE = grid([[[10, 74]], [[20, 84]], [[40, 104]]], batch=(1, 2, 4), sizes=(1, 65))
"""One us a token of a request, ten a request."""


def graph_model(**changes: Any) -> CostModel:
    tiers = token_tiers(2048, 8)
    return table_model(rounds="graphs", token_tiers=tiers, verify=SLOPE, **changes)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [5, 10, 23])
def test_rounds_are_padded_as_the_runtime_pads(batch: int, most: int) -> None:
    """Against the runtime's own tiers and buckets, for every size that a batch can ask for."""
    bucket = bucket_of(batch, 4)
    tiers = token_tiers(bucket * most, 8)
    for tokens in range(batch, batch * most + 1):
        tier = next(tier for tier in tiers if tier >= tokens)
        wanted = graph_model().verify_us(tier, bucket, 1)
        assert graph_model().verify_us(tokens, batch, 1, most) == pytest.approx(wanted)


def test_what_is_always_verified_whole_is_not_padded() -> None:
    assert graph_model().verify_us([5, 9, 40], 1, 1) == pytest.approx([14, 18, 49])
    assert table_model(verify=SLOPE).verify_us([5, 9], 1, 1, 60) == pytest.approx([14, 18])


def test_a_budget_still_sees_a_slope_below_the_smallest_tier() -> None:
    cost = graph_model().step_cost(1, 1, levels=1, level_width=1, max_tokens=13)
    around = 3 + 0.5 + 7 + 1.5  # what else a round takes; two tokens are read
    assert cost.token_counts == (1, 2, 3, 4, 5, 6, 7, 8, 13)
    own = [10, 11, 12, 13, 14, 15, 16, 17, 22]
    assert cost.step_us == pytest.approx([us + around for us in own])


def test_the_drafter_reads_as_deep_as_the_tree_after_last_rounds_too() -> None:
    last = Steps(1, 4, 64, levels=4, level_width=1, num_emitted=0)
    assert graph_model().draft_us(last) == pytest.approx(3 + 3 * 2 + 0.5 + 10)
    assert table_model().draft_us(last) == pytest.approx(3 + 3 * 2 + 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_tiers": [8, 4]}, r"token_tiers\[1\] is 4 after 8"),
        ({"rounds": "ordinary"}, "token_tiers of ordinary rounds"),
        ({"capture_limit_tokens": 8}, "beside a capture_limit_tokens"),
        ({"rounds": "eager"}, "rounds: Input should be 'ordinary' or 'graphs'"),
    ],
)
def test_tiers_that_contradict_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(json.loads(graph_model().to_bytes()) | changes))
    with pytest.raises(InputError, match=words):
        load_cost_model(path)


def test_an_engines_sizes_stand_in_place_of_the_runtimes() -> None:
    points = replace(SMALL, context_tokens=(8,), batch_sizes=(1,), capture_limit_tokens=8)
    record = profile(toy(), points, graphs=GraphSettings(capture=TapeCapture())).record
    assert (record.rounds, record.token_tiers, record.capture_limit_tokens) == ("graphs", (), 8)


def test_ordinary_times_of_a_gpu_are_named() -> None:
    on_gpu = MACHINE.model_copy(update={"cuda": "13.0"})
    [line] = check_rounds(CostModel(table_record(machine=on_gpu)))
    assert "--rounds graphs" in line
    assert check_rounds(CostModel(table_record(machine=on_gpu, rounds="graphs"))) == []
    assert check_rounds(table_model()) == []


def test_what_a_loop_would_run_is_timed() -> None:
    pair = toy()
    assert timed_rounds("auto", pair) is None  # a CPU
    assert timed_rounds("ordinary", pair) is None
    with pytest.raises(UsageError, match=r"--rounds graphs: .*found none on cpu here"):
        timed_rounds("graphs", pair)
    with pytest.raises(UsageError, match="auto, graphs or ordinary"):
        parse_rounds("both")


def test_the_verb_says_what_it_timed(tmp_path: Path) -> None:
    outcome = passes("profile", "-o", tmp_path / "c.json", *QUICK, "--json")
    assert json.loads(outcome.out)["rounds"] == "ordinary"
    assert "--rounds" in refuses(2, "profile", "-o", tmp_path / "d.json", "--rounds", "both")
    assert "--rounds" in refuses(
        2, "profile", "-o", tmp_path / "d.json", *QUICK, "--rounds", "graphs"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]
