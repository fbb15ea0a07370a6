"""Where the time of a round is booked, on traces written by hand; modes do the same work."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.decode_8b.measuring import Counts, Job, timed
from benchmarks.decode_8b.pair import TINY, random_pair
from benchmarks.decode_8b.policies import policies
from benchmarks.decode_8b.running import Cell
from benchmarks.decode_8b.split import Bookkeeper
from benchmarks.decode_8b.trace import CALL, GRAPH, LAP, read_trace

Event = dict[str, Any]
LEVEL = "('policy', 1, 2)"


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


def test_all_modes_decode_the_same() -> None:
    """Else their times would be of different work."""
    pair, found = random_pair(TINY, torch.device("cpu")), []
    [(name, policy)] = [item for item in policies(2).items() if item[0].startswith("echo")]
    for mode in ("eager", "graphs", "torch rules"):
        few = Counts(warm=1, timed=3, lapped=2, learned=1, profiled=2)
        times = timed(Job(name, policy, Cell(2, 24), mode), pair, few)
        found.append((times["verified"], times["levels"], times["emitted"]))
    assert found[0] == found[1] == found[2]
