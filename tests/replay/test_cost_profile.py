"""Profiling a tiny random pair: it measures what is there, and predicts live rounds' counts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import specctl.cli.judging  # registers the verb
from benchmarks.predicted_time import predict
from specctl.errors import UsageError
from specctl.policy import Chain, EntropyBins, RootOnly, StaticTree
from specctl.replay.cost import CostModel, load_cost_model
from specctl.replay.cost.model import replay_clock
from specctl.replay.cost.probe import RoundProbe, RoundSamples, TreeShape
from specctl.replay.cost.profile import ProfileGrid, check_grid, profile
from specctl.runtime.load import Pair
from specctl.runtime.requests import Stopwatch
from tests.cli.command import passes, refuses, specctl
from tests.replay.costs import PUBLISHED, SMALL, toy
from tests.replay.profiling import QUICK, VirtualTime, run_live

TREE = StaticTree(depth=3, top_k=3, num_tokens=10)


def test_a_profile_is_whole_and_ticks(tmp_path: Path) -> None:
    ticks: list[int] = []
    record = profile(toy(), SMALL, on_step=lambda: ticks.append(1)).record
    assert len(ticks) == SMALL.num_steps
    assert record.verify.sizes == (1, 4, 8)
    assert record.verify.batch_sizes == (1, 2)
    assert record.verify.context_tokens == (8, 24)
    assert record.draft.level.sizes == (1, 3)
    assert record.draft.extend.sizes == (1, 2, 5)
    assert record.prefill.sizes == (3, 12)
    assert set(record.held_out) == {"verify", "prefill", "draft.level", "draft.prefill"}
    assert record.held_out["verify"].num_points == 4  # 6 tokens, at each batch and context
    assert record.num_samples >= 3
    assert record.machine.num_threads == torch.get_num_threads()


def test_a_target_alone_has_no_draft() -> None:
    pair = toy()
    alone = Pair(pair.target, None, "none", pair.drafter_digest)
    record = profile(alone, SMALL).record
    assert record.draft is None
    assert record.verify.sizes == (1,)


@dataclass(frozen=True)
class Charged:
    """A pair whose target takes 1,000 us a token and whose drafter takes 300, and its profile."""

    pair: Pair
    clock: VirtualTime
    model: CostModel


@pytest.fixture(scope="module")
def charged() -> Charged:
    clock, pair = VirtualTime(), toy()
    clock.charge(pair.target.model, 1000)
    clock.charge(pair.drafter.model, 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", clock)
        return Charged(pair, clock, profile(pair, SMALL))


def test_a_known_cost_is_found_where_it_is(charged: Charged) -> None:
    """Every part holds its own models' work and nobody else's."""
    model, record, few = charged.model, charged.model.record, 10.0
    assert model.verify_us([1, 4, 16, 24], [1, 1, 2, 2], 8) == pytest.approx(
        [1_000, 4_000, 16_000, 24_000], abs=few
    )
    level = np.array(record.draft.level.us)[:, 0]
    assert level == pytest.approx(np.array([[300, 900], [600, 1800]]), abs=few)
    extend = np.array(record.draft.extend.us)[:, 0]
    assert extend == pytest.approx(300 * np.array([[1, 2, 5], [2, 4, 10]]), abs=few)
    assert np.array(record.prefill.us).ravel() == pytest.approx([3_000, 12_000], abs=few)
    with_drafter = [3 * 1_300 + 300, 12 * 1_300 + 300]  # it reads the first new token too
    assert np.array(record.draft.prefill.us).ravel() == pytest.approx(with_drafter, abs=few)
    for part in (record.loop, record.draft.loop, record.draft.root, record.draft.select):
        assert 0 < np.max(part.us) <= few
    assert all(error.worst < 0.01 for error in record.held_out.values())


def test_a_probe_leaves_the_batch_where_it_was() -> None:
    """Rounds at one place are the same round: same shape, same tokens verified."""
    pair, samples = toy(), RoundSamples()
    with torch.inference_mode():
        probe = RoundProbe(pair, 2, 16, [TreeShape(3, 8)], (1, 2), num_rounds=4)
        before = probe.pair.target.model.cache.storage[..., :16, :].clone()
        probe.run(TreeShape(3, 8), samples)
        probe.run(None, samples)
        after = probe.pair.target.model.cache.storage[..., :16, :]
    assert torch.equal(before, after)
    assert {point: len(times) for point, times in samples.verify.by_point.items()} == {
        (2, 16, 8): 4,
        (2, 16, 1): 4,
    }
    assert len(samples.level.by_point[2, 16, 3]) == 3 * 4
    assert {point[2] for point in samples.extend.by_point} == {1, 2}


def test_laps_are_kept_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = VirtualTime()
    monkeypatch.setattr(time, "perf_counter", now)
    clock = Stopwatch(torch.device("cpu"))
    for phase, us in (("draft", 10), ("policy", 20), ("draft", 30)):
        now.now_us += us
        clock.lap(phase)
    assert clock.laps() == {"draft": pytest.approx([11, 31]), "policy": pytest.approx([21])}


SHAPES = [
    RootOnly(),
    Chain(num_draft_tokens=2),
    TREE,
    EntropyBins(base=TREE, edges=(9.0, 10.0, 11.0)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_live_runs_take_what_was_predicted(
    shape: Any, batch_size: int, charged: Charged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the virtual clock nothing is noise: what a run's forwards cost must come out of its
    counts, padding, last rounds and emptying batches included."""
    monkeypatch.setattr(time, "perf_counter", charged.clock)
    began = charged.clock.now_us
    recorder, prompts, _ = run_live(charged.pair, shape, batch_size)
    wall_us = charged.clock.now_us - began
    drafts = not isinstance(shape, RootOnly)
    found = predict(charged.model, recorder.steps(), prompts, drafts=drafts)
    assert found.wall_us == pytest.approx(wall_us, rel=0.005)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_live_rounds_are_recorded_and_add_up(shape: Any, batch_size: int) -> None:
    recorder, prompts, calls = run_live(toy(), shape, batch_size)
    steps, model = recorder.steps(), CostModel(PUBLISHED)
    assert np.sum(steps.batch_size) == calls
    assert (np.asarray(steps.num_tokens) >= steps.batch_size).all()
    assert (np.asarray(steps.levels) == 0).all() == isinstance(shape, RootOnly)
    drafts = not isinstance(shape, RootOnly)
    found = predict(model, steps, prompts, drafts=drafts)
    prefill = sum(5885.90713 + n * 21.0103129 + 1206.83946 for n in prompts)
    assert found.prefill_us == pytest.approx(prefill)
    assert found.wall_us == pytest.approx(prefill + model.round_us(steps).sum())
    assert found.loop_us == pytest.approx(1206.83946 * len(steps.num_tokens))


def test_the_drafter_reads_nothing_after_a_last_round() -> None:
    recorder, prompts, _ = run_live(toy(), TREE, batch_size=1)
    read = np.asarray(recorder.steps().num_emitted)
    assert (read == 0).sum() == len(prompts)  # one request at a time: each ends once
    assert read[-1] == 0


def test_replayed_rounds_have_a_clock() -> None:
    outcomes = SimpleNamespace(
        verified=np.array([10, 4]), levels=np.array([3, 2]), expanded=np.array([6, 3])
    )
    run = SimpleNamespace(
        outcomes=outcomes,
        context_tokens=np.array([65, 70]),
        emitted=np.array([2, 3]),
        is_last=np.array([False, True]),
    )
    fixed = 5885.90713 + 2135.26175 + 1206.83946
    per_cached = 0.0392645679 + 0.00237768493
    # 3 levels of width 3: the root's one and 2 of 3 nodes; 2 levels of width 3: 1 + 3.
    expected = [
        fixed + 10 * 21.0103129 + 64 * per_cached + 7 * 0.841429603,
        fixed + 4 * 21.0103129 + 69 * per_cached + 4 * 0.841429603,
    ]
    assert replay_clock(CostModel(PUBLISHED))(run) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": (2, 4)}, r"--tokens: expected 1 first"),
        ({"batch_sizes": (2,)}, r"--batch-sizes: expected 1 first"),
        ({"widths": (2, 3)}, r"--widths: expected 1 first"),
        ({"tokens": (1, 99)}, r"--tokens: expected at most 31 at these widths"),
        ({"widths": (1, 65)}, r"--widths: expected at most 64"),
        ({"context_tokens": (8, 500)}, r"--contexts: expected at most 248"),
    ],
)
def test_grids_beyond_the_pair_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_grid(toy(), ProfileGrid(**{**vars(SMALL), **changes}))


def test_the_verb_writes_a_model(tmp_path: Path) -> None:
    path = tmp_path / "cost_model.json"
    outcome = passes("profile", "-o", path, *QUICK, "--json")
    model = load_cost_model(path)
    assert model.digest in outcome.out
    assert model.record.verify.sizes == (1, 5)
    shown = passes("profile", "-o", path, *QUICK, "--drafter", "none")
    assert "ms to verify" in shown.out
    assert load_cost_model(path).record.draft is None


def test_an_interrupted_profile_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "cost_model.json"
    path.write_text("old")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specctl.replay.cost.profile.fit_table", interrupt)
    assert specctl("profile", "-o", path, *QUICK).code == 130
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [(path.name, "old")]


def test_refusals_come_before_the_work(tmp_path: Path) -> None:
    assert "--tokens" in refuses(2, "profile", "-o", tmp_path / "c.json", "--tokens", "4,2")
    refuses(6, "profile", "-o", tmp_path / "none" / "c.json")
    refuses(6, "profile", "-o", tmp_path)
    assert list(tmp_path.iterdir()) == []
