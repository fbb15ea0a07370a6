"""Where the time of a round is booked, on traces written by hand and on one of the tiny pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.decode_8b.measuring import Counts, Job, profiled, timed
from benchmarks.decode_8b.pair import LLAMA_8B, TINY, random_pair
from benchmarks.decode_8b.policies import policies
from benchmarks.decode_8b.running import Cell, Running
from benchmarks.decode_8b.split import Bookkeeper, busy_us, own_kernels
from benchmarks.decode_8b.trace import CALL, GRAPH, LAP, read_trace, traced
from specctl.runtime.load import Pair
from specctl.runtime.requests import Completion

CPU = torch.device("cpu")
Event = dict[str, Any]
LEVEL, VERIFY = "('policy', 1, 2)", "('ask', 1, 60, 'greedy')"


class Device:
    """Writes the events of a stream that works off what it is given, one piece after another."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now_us = self.free_us = 0.0
        self._launches = 0

    def launch(self, *pieces: tuple[str, float], call: str = "cudaLaunchKernel") -> None:
        """One call of the host, and the work that it asks for: names and us."""
        self._launches += 1
        self._add("cuda_runtime", call, self.now_us, 1.0, self._launches)
        self.now_us += 2.0
        for name, us in pieces:
            start = max(self.free_us, self.now_us)
            self._add("kernel", name, start, us, self._launches)
            self.free_us = start + us

    def mark(self, name: str, since_us: float) -> None:
        self._add("user_annotation", name, since_us, self.now_us - since_us, None)
        self.now_us += 1.0

    def lap(self, phase: str) -> None:
        self.mark(LAP + phase, self.now_us)

    def _add(self, cat: str, name: str, ts: float, dur: float, correlation: int | None) -> None:
        args = {} if correlation is None else {"correlation": correlation}
        self.events.append({"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args})


def eager_round(device: Device) -> None:
    """Books, a drafter's pass, features and books again; a target's pass, a walk; the commit."""
    device.launch(("fill", 1))
    began = device.now_us
    device.launch(("gemm", 30), ("elementwise", 5))
    device.mark(CALL + "draft", began)
    device.launch(("scan_kernel", 7))
    device.launch(("elementwise", 3))
    device.lap("draft")
    device.lap("policy")
    began = device.now_us
    device.launch(("gemm", 200))
    device.mark(CALL + "verify", began)
    device.launch(("walk_kernel", 4))
    device.lap("verify")
    device.launch(("commit_kernel", 6))
    device.launch(("copy", 2))
    device.lap("other")


def test_a_round_without_graphs_is_booked_by_its_marks() -> None:
    device = Device()
    for _ in range(2):
        eager_round(device)
    found = Bookkeeper().split(read_trace(device.events), 2)
    assert found.by_phase == {"draft": 35, "policy": 1 + 7 + 3, "verify": 204, "commit": 8}
    assert found.by_op == {"features": 7, "deciding": 0, "trees": 0, "books": 1 + 3}
    assert found.num_work == 9
    assert found.num_launches == 8
    assert found.unknown_us == found.by_graph_us == 0


def level_part(device: Device, *, replays: bool) -> None:
    """A drafted level: the drafter's two kernels, ours, and one of torch that keeps books."""
    kernels = [("gemm", 30.0), ("elementwise", 5.0), ("append_kernel", 4.0), ("elementwise", 2.0)]
    began = device.now_us
    if replays:
        device.launch(*kernels, call="cudaGraphLaunch")
    else:
        for kernel in kernels[:2]:
            device.launch(kernel)
        device.mark(CALL + "draft", began)
        for kernel in kernels[2:]:
            device.launch(kernel)
    device.mark(GRAPH + LEVEL, began)


def learned_from(*parts: bool) -> Bookkeeper:
    books, device = Bookkeeper(), Device()
    for replays in parts:
        level_part(device, replays=replays)
    books.learn(read_trace(device.events))
    return books


def test_kernels_of_a_graph_are_those_of_the_run_before_it() -> None:
    books, device = learned_from(False, True), Device()
    level_part(device, replays=True)
    found = books.split(read_trace(device.events), 1)
    assert found.by_phase == {"draft": 35, "policy": 6, "verify": 0, "commit": 0}
    assert found.by_graph_us == 0
    assert found.num_launches == 1


def test_a_graph_that_was_never_seen_without_is_told_apart() -> None:
    """Our own kernels say what they are; the rest goes to what the part is mostly for."""
    books, device = learned_from(True), Device()
    level_part(device, replays=True)
    began = device.now_us
    device.launch(("gemm", 200), ("walk_kernel", 4), ("commit_kernel", 1), call="cudaGraphLaunch")
    device.mark(GRAPH + VERIFY, began)
    found = books.split(read_trace(device.events), 1)
    assert found.by_phase == {"draft": 37, "policy": 4, "verify": 204, "commit": 1}
    assert found.by_graph_us == 37 + 204


def test_a_kernel_that_was_not_learned_does_not_shift_the_others() -> None:
    """Here a product that was split in two when it was captured."""
    books, device = learned_from(False), Device()
    began = device.now_us
    pieces = [("gemm", 30.0), ("split_k", 9.0), ("elementwise", 5.0), ("append_kernel", 4.0)]
    device.launch(*pieces, ("elementwise", 2.0), call="cudaGraphLaunch")
    device.mark(GRAPH + LEVEL, began)
    found = books.split(read_trace(device.events), 1)
    assert found.by_phase == {"draft": 35 + 9, "policy": 6, "verify": 0, "commit": 0}
    assert found.by_graph_us == 9


def test_work_without_its_launch_is_nobodys() -> None:
    device = Device()
    eager_round(device)
    calls = [e for e in device.events if e["cat"] == "cuda_runtime"]
    device.events.remove(calls[1])
    found = Bookkeeper().split(read_trace(device.events), 1)
    assert found.unknown_us == 35
    assert found.by_phase["draft"] == 0


def test_overlapping_work_is_busy_once() -> None:
    events = [
        {"cat": "kernel", "name": "a", "ts": ts, "dur": dur, "args": {}}
        for ts, dur in ((0, 10), (4, 3), (8, 4), (20, 5))
    ]
    assert busy_us(read_trace(events).work) == 12 + 5


def test_our_kernels_are_known_by_name() -> None:
    """The two that the hand-written traces rest on, and none that belongs to two phases."""
    known = own_kernels()
    assert known["scan_kernel"] == ("policy", "features")
    assert known["append_kernel"] == ("policy", "trees")
    assert known["prune_kernel"] == ("policy", "deciding")
    assert known["commit_kernel"][0] == "commit"
    assert not {"walk_kernel", "tree_attention_kernel"} & set(known)


@pytest.fixture(scope="module")
def pair() -> Pair:
    """On a CPU the operators are the profiler's work."""
    return random_pair(TINY, CPU)


def job(word: str, mode: str, batch_size: int = 1) -> Job:
    [(name, policy)] = [item for item in policies(batch_size).items() if item[0].startswith(word)]
    return Job(name, policy, Cell(batch_size, 24), mode)


FEW = Counts(warm=1, timed=3, lapped=2, learned=1, profiled=2)


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_row_of_the_tiny_pair(pair: Pair, mode: str) -> None:
    some = job("c2t", mode, batch_size=2)
    times = timed(some, pair, FEW)
    split = profiled(some, pair, FEW, times["round_us"])
    assert times["rounds"] == 3
    assert 0 < times["min_us"] <= times["round_us"] <= times["max_us"]
    assert times["drafting_us"] > 0  # of other rounds than those above
    assert times["levels"] >= 1
    assert 1 < times["verified"] <= 60
    assert times["faults"] == 0
    assert all(split[f"{phase}_us"] > 0 for phase in ("draft", "policy", "verify", "commit"))
    assert split["unknown_us"] == split["by_graph_us"] == 0


def test_all_modes_decode_the_same(pair: Pair) -> None:
    """Else their times would be of different work."""
    found = []
    for mode in ("eager", "graphs", "torch rules"):
        times = timed(job("echo", mode, batch_size=2), pair, FEW)
        found.append((times["verified"], times["levels"], times["emitted"]))
    assert found[0] == found[1] == found[2]


def test_rounds_in_which_a_graph_is_captured_are_not_timed(pair: Pair) -> None:
    some, num_rounds = job("ar", "eager"), 0
    running = Running(pair, some.policy, some.cell, num_rounds=12)
    running.step()
    step, counters = running.loop.step, running.loop.graph_counters

    def capturing() -> list[Completion]:
        nonlocal num_rounds
        num_rounds += 1
        counters.captures += num_rounds in (1, 4)
        return step()

    running.loop.step = capturing  # type: ignore[method-assign, assignment]
    assert len(running.round_us(4)) == 4
    assert num_rounds == 6


def test_marks_stand_around_the_passes_of_the_models(pair: Pair) -> None:
    some = job("eagle2", "eager")
    running = Running(pair, some.policy, some.cell, num_rounds=4)
    running.step()
    trace = traced(lambda: running.steps(2), CPU)
    passes, names = trace.under(CALL), {True: set(), False: set()}
    for work in trace.work:
        inside = any(span.start_us <= work.start_us <= span.end_us for span in passes)
        names[inside].add(work.name)
    assert "aten::linear" in names[True]
    assert "aten::linear" not in names[False]
    assert "aten::topk" in names[False]
    assert [lap.name for lap in trace.under(LAP)].count("verify") == 4  # asked and read, twice


def test_the_8b_shape_is_llama_3_1s() -> None:
    config = LLAMA_8B.target_config
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert config.rope_parameters["rope_theta"] == 500_000
    assert LLAMA_8B.head_config.resolve_aux_layers(32) == (2, 16, 29)
