"""Profiling a tiny random pair: it measures what is there and predicts live rounds."""

from __future__ import annotations

import json
import logging
import re
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl import progress
from specctl.errors import UsageError
from specctl.policy import (
    Chain,
    EntropyBins,
    JointThreshold,
    Policy,
    RootOnly,
    StaticTree,
    build_shape,
)
from specctl.replay.config import ProfileGrid
from specctl.replay.cost import live
from specctl.replay.cost.files import load_cost_model
from specctl.replay.cost.live import StepRecorder, predicted_us
from specctl.replay.cost.model import LiveCheck, Steps
from specctl.replay.cost.probe import Bench, RoundProbe, Samples, own_clock, probed_tree
from specctl.replay.cost.profile import check_lines, check_verdict, profile, settled
from specctl.runtime import compare
from specctl.runtime.cached_model import SlotCache
from specctl.runtime.capture import GraphSettings, Recording
from specctl.runtime.load import Pair
from specctl.runtime.requests import Stopwatch
from specctl.runtime.words import NamedPolicy
from tests.cli.command import passes
from tests.replay.costs import SMALL, table_model, toy
from tests.runtime.captured import TapeCapture
from tests.runtime.toy import toy_requests


class VirtualTime:
    """A clock that moves when told to, and a microsecond whenever it is read."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def __call__(self) -> float:
        self.now_us += 1.0
        return 1e-6 * self.now_us

    def charge(self, model: Any, us_per_token: float) -> None:
        """Every forward of a model takes so long, by its tokens."""
        inner = model.model.forward

        def forward(*args: Any, **options: Any) -> Any:
            self.now_us += us_per_token * options["input_ids"].numel()
            return inner(*args, **options)

        model.model.forward = forward


def run_live(
    pair: Pair, shape: Any, batch_size: int, graphs: GraphSettings | None
) -> tuple[Steps, list[int]]:
    """What a recorder saw, and the lengths of the prompts."""
    recorder, requests = StepRecorder(), toy_requests(5, max_new_tokens=9)
    loop = Bench(pair, graphs).loop(Policy(shape=shape), requests, batch_size, recorder)
    assert loop.round.is_static == (graphs is not None)
    list(loop.run(()))
    return recorder.steps(), [len(request.prompt_ids) for request in requests]


OPTIONS = ("--device", "cpu", "--batch-sizes", "1", "--contexts", "8", "--verified-tokens", "1,5")
QUICK = (*OPTIONS, "--widths", "1,2", "--quick")


TREE = StaticTree(depth=3, top_k=3, num_tokens=10)
BINS = EntropyBins(base=TREE, edges=(9.0, 10.0, 11.0))
SHAPES = [RootOnly(), Chain(num_draft_tokens=2), TREE, BINS]
MODES = ("ordinary", "graphs")


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


@pytest.fixture
def charged(request: pytest.FixtureRequest) -> SimpleNamespace:
    return charged_pair(request.param)


@cache
def charged_pair(mode: str) -> SimpleNamespace:
    """A pair whose target takes 1,000 us a token and whose drafter takes 300, and its profile."""
    clock, pair = VirtualTime(), toy()
    clock.charge(pair.target.model, 1000)
    clock.charge(pair.drafter.model, 300)

    def graphs() -> GraphSettings | None:
        """Fresh captures of the mode that is timed."""
        tape = GraphSettings(capture=ChargingTape(clock), flat_tokens=8)
        return None if mode == "ordinary" else tape

    ticks: list[int] = []

    def show_bar(_: str, total: int | None) -> Any:
        ticks.append(-(total or 0))
        return nullcontext(ticks.append)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("perf_counter", "thread_time"):
            patch.setattr(time, name, clock)
        patch.setattr(compare, "SCHEDULED", Path("none"))
        patch.setattr(progress, "_show_bar", show_bar)
        patch.setattr("specctl.replay.cost.profile.NUM_TIMED", 1)
        requests = toy_requests(3, max_new_tokens=9)
        contexts = (8, 24) if mode == "ordinary" else (8,)
        points = SMALL.model_copy(update={"context_tokens": contexts})
        model = profile(Bench(pair, graphs()), points, requests=requests)
    return SimpleNamespace(pair=pair, clock=clock, model=model, graphs=graphs, ticks=ticks)


@pytest.mark.parametrize("charged", MODES, indirect=True)
def test_a_profile_is_whole_and_ticks(charged: SimpleNamespace) -> None:
    model, is_ordinary = charged.model, charged.graphs() is None
    assert (charged.ticks[0], sum(charged.ticks)) == (-len(charged.ticks[1:]), 0)
    assert model.verify.sizes == (1, 4, 8)
    assert model.verify.batch_sizes == (1, 2)
    assert model.verify.context_tokens == ((8, 24) if is_ordinary else (8,))
    assert model.draft.level.sizes == (1, 3)
    # Graphs read as deep as their trees, and one more.
    assert model.draft.extend.sizes == ((1, 2, 5) if is_ordinary else (2, 4, 5, 9))
    assert model.prefill.sizes == (3, 12)
    assert set(model.held_out) == {"verify", "prefill", "draft.level", "draft.prefill"}
    # 6 tokens, at each batch and context.
    assert model.held_out["verify"].num_points == (4 if is_ordinary else 2)
    assert model.num_samples >= 3
    assert model.machine.num_threads == torch.get_num_threads()
    assert model.token_tiers[:3] == (() if is_ordinary else (8, 16, 32))
    assert model.draft.loop.us[0][0][0] > 0


@pytest.mark.parametrize("charged", MODES, indirect=True)
def test_a_profile_ends_by_checking_itself(charged: SimpleNamespace) -> None:
    """Three policies within the grid, decoded one prompt at a time on the same clock."""
    plain, chain, tree = charged.model.checks
    assert [plain.policy, chain.policy] == ["ar", "chain"]
    assert tree.policy == "eagle2:6x3/8"
    for one in charged.model.checks:
        assert one.num_tokens == 3 * 9
        assert one.error == pytest.approx(0, abs=0.005)
    lines = list(check_lines(charged.model))
    assert re.fullmatch(r"check: ar: (\d+) tokens/s predicted, \1 measured \([+-]0%\)", lines[0])
    assert len(lines) == 3


def test_a_check_that_is_far_off_is_warned_of() -> None:
    """Of 1.4 s a thread waited 0.42 s: without them it took 0.98 s, as predicted."""
    fair = LiveCheck(policy="ar", num_tokens=100, predicted_us=1e6, measured_us=1.05e6)
    fast = fair.model_copy(update={"policy": "chain", "measured_us": 0.8e6})
    slow = fair.model_copy(update={"policy": "eagle2", "measured_us": 1.4e6})
    waited = slow.model_copy(update={"waited": 0.3})
    off = waited.model_copy(update={"predicted_us": 0.7e6})
    lines = [
        list(check_lines(table_model(checks=checks)))
        for checks in ((fair,), (fair, fast, slow), (waited,), (off,))
    ]
    cases = ((fair, fast, slow), (waited,), (off,))
    verdicts = [check_verdict(table_model(checks=one)) for one in cases]
    assert len(lines[0]) == 1
    assert lines[1][2] == "check: eagle2: 100 tokens/s predicted, 71 measured (+40%)"
    assert verdicts[0].startswith("The clock is off by +40% in its own check (eagle2)")
    assert lines[2][0].endswith("71 measured (+40%, 30% of the time waiting)")
    assert verdicts[1].startswith("The clock's check was disturbed, ")
    assert verdicts[2].startswith("The clock is off by")


def test_waiting_for_a_processor_is_no_time_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one thread a sleep, like other work, takes nothing off the processor's own time; on more
    of them there is no such clock."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        watch = Stopwatch(now=own_clock(torch.device("cpu")))
        time.sleep(0.05)
        watch.lap("other")
        assert watch.times().other_us < 25_000
        torch.set_num_threads(2)
        assert own_clock(torch.device("cpu")) is time.perf_counter
    finally:
        torch.set_num_threads(before)
    assert 0 <= compare.waited_us() <= compare.waited_us()
    monkeypatch.setattr(compare, "SCHEDULED", Path("none"))
    assert compare.waited_us() is None


def test_an_engines_sizes_stand_in_place_of_the_runtimes() -> None:
    changes = {"context_tokens": (8,), "batch_sizes": (1,), "tokens": (1, 4), "widths": (1,)}
    points = SMALL.model_copy(update={**changes, "capture_limit_tokens": 8})
    model = profile(Bench(toy(), GraphSettings(capture=TapeCapture())), points)
    assert (model.rounds, model.token_tiers, model.capture_limit_tokens) == ("graphs", (), 8)


@pytest.mark.parametrize("charged", MODES, indirect=True)
def test_a_known_cost_is_found_where_it_is(charged: SimpleNamespace) -> None:
    """Every part holds its own models' work and nobody else's."""
    model, few = charged.model, 12.0
    verify = 1000 * np.array([[1, 4, 8], [2, 8, 16]])
    assert np.array(model.verify.us)[:, 0] == pytest.approx(verify, abs=few)
    level = np.array(model.draft.level.us)[:, 0]
    assert level == pytest.approx(np.array([[300, 900], [600, 1800]]), abs=few)
    extend = np.array(model.draft.extend.us)[:, 0]
    read = 300 * np.outer([1, 2], model.draft.extend.sizes)
    assert extend == pytest.approx(read, abs=few)
    assert np.array(model.prefill.us).ravel() == pytest.approx([3_000, 12_000], abs=few)
    with_drafter = [3 * 1_300 + 300, 12 * 1_300 + 300]  # it reads the first new token too
    assert np.array(model.draft.prefill.us).ravel() == pytest.approx(with_drafter, abs=few)
    for part in (model.loop, model.draft.loop, model.draft.root, model.draft.select):
        assert 0 < np.max(part.us) <= few
    assert all(error.worst < 0.01 for error in model.held_out.values())


def first_entries(cache: SlotCache) -> Tensor:
    return torch.stack([cache.of_layer(n)[..., :16, :] for n in range(cache.num_layers)])


@pytest.mark.parametrize("mode", MODES)
def test_a_probe_leaves_the_batch_where_it_was(mode: str) -> None:
    """Rounds at one place are the same round: same shape, same tokens verified."""
    pair, samples, tape = toy(), Samples(), TapeCapture()
    graphs = GraphSettings(capture=tape) if mode == "graphs" else None
    read = (1,) if graphs else (1, 2)
    with torch.inference_mode():
        probe = RoundProbe(Bench(pair, graphs), 2, 16, [probed_tree(3, 8)], read)
        before = first_entries(pair.target.model.cache)
        for tree, num_graphs in ((probed_tree(3, 8), 4 + 3), (None, 4 + 3 + 3)):
            probe.run(tree, 4, samples)  # levels; selection, verification, commit
            assert len(tape.num_launches) == (num_graphs if graphs else 0)
        after = first_entries(pair.target.model.cache)
    assert torch.equal(before, after)
    counts = {point: len(us) for point, us in samples.by_part["verify"].items()}
    assert counts == {(2, 16, 8): 4, (2, 16, 1): 4}
    assert len(samples.by_part["draft.level"][2, 16, 3]) == 3 * 4
    assert {point[2] for point in samples.by_part["draft.extend"]} == ({5} if graphs else {1, 2})


def test_a_capture_that_fails_is_no_measurement(caplog: pytest.LogCaptureFixture) -> None:
    """Its part would run eagerly, which nobody asked to have timed."""
    caplog.set_level(logging.CRITICAL)
    settings = GraphSettings(capture=TapeCapture(fails=1))
    with torch.inference_mode():
        probe = RoundProbe(Bench(toy(), settings), 1, 8, [], (1,))
        with pytest.raises(UsageError, match=r"captured.*1 captures failed.*--rounds ordinary"):
            probe.run(None, 1, Samples())


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(
    ("charged", "shape"),
    [("ordinary", shape) for shape in SHAPES] + [("graphs", shape) for shape in SHAPES[:3]],
    indirect=["charged"],
    ids=lambda given: getattr(given, "kind", given),
)
def test_live_runs_take_what_was_predicted(
    shape: Any, batch_size: int, charged: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a virtual clock, padding, last rounds and emptying batches included."""
    monkeypatch.setattr(time, "perf_counter", charged.clock)
    began = charged.clock.now_us
    steps, prompts = run_live(charged.pair, shape, batch_size, charged.graphs())
    wall_us = charged.clock.now_us - began
    found = predicted_us(charged.model, steps, prompts, drafts=not isinstance(shape, RootOnly))
    assert found == pytest.approx(wall_us, rel=0.005)


def test_the_time_of_decisions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of three levels decides twice: 300 us each are 200 a level. It never stops here, and
    what stops after the first level has decided as often as it has levels."""
    never, clock = Policy(shape=JointThreshold(min_prob=0.0, depth=3, top_k=1)), VirtualTime()
    rule: Any = type(build_shape(never.shape))
    grow = rule.grow

    def slow(self: Any, *arguments: Any) -> Any:
        clock.now_us += 300.0
        return grow(self, *arguments)

    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, name, clock)
    monkeypatch.setattr(rule, "grow", slow)
    with torch.inference_mode():
        requests = toy_requests(2, max_new_tokens=9)
        found = live.time_decider(Bench(toy()), NamedPolicy("never", never), (1, 2), requests)
    assert found.batch_sizes == (1, 2)
    assert found.level_us == pytest.approx([200.0, 200.0], abs=8)


GRIDS = [
    ({"tokens": (2, 4)}, r"--verified-tokens must begin with 1"),
    ({"batch_sizes": (2,)}, r"--batch-sizes must begin with 1"),
    ({"widths": (2, 3)}, r"--widths must begin with 1"),
    ({"tokens": (1, 99)}, r"--verified-tokens may be at most 31 at these widths"),
    ({"widths": (1, 65)}, r"--widths may be at most 64"),
    ({"context_tokens": (8, 500)}, r"--contexts may be at most 248"),
]


@pytest.mark.parametrize(("changes", "words"), GRIDS)
def test_grids_beyond_the_pair_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settled(ProfileGrid(**{**vars(SMALL), **changes}), Bench(toy()))


@pytest.mark.usefixtures("busy_machine")
def test_the_verb_writes_a_model(tmp_path: Path) -> None:
    path, mine = tmp_path / "cost_model.json", "threshold:depth=2:top_k=2"
    told = json.loads(passes("profile", "-o", path, *QUICK, "-p", mine, "--json").out)
    model = load_cost_model(path)
    assert list(told["deciders"]) == list(model.deciders) == ["threshold"]
    assert model.deciders["threshold"].policy == mine
    assert told["checks"][-1]["policy"] == mine, "checked like the others"
    assert (told["digest"], told["rounds"]) == (model.digest, "ordinary")
    assert model.verify.sizes == (1, 5)
    shown = passes("profile", "-o", path, *QUICK, "--drafter", "none")
    assert "ms to verify" in shown.out
    alone = load_cost_model(path)
    assert (alone.draft, [one.policy for one in alone.checks]) == (None, ["ar"])
