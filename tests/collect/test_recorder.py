"""From a device into a trace set: exact, whole prompts, in the background; at a bound it waits.

Devices that are not there are lanes that copy at the worst moment, or when a gate opens.
"""

from __future__ import annotations

import errno
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event as Flag
from threading import Thread

import pytest
import torch
from torch import Tensor

from specctl.collect import transfer
from specctl.collect.recorder import RecorderConfig
from specctl.collect.rounds import TraceRecorder
from specctl.collect.trace_writer import TraceWriter
from specctl.collect.transfer import Event, Lane, Ready
from specctl.errors import OutputError
from specctl.logs.trace_files import Segment
from specctl.logs.trace_set import TraceSet, read_listing
from specctl.runtime.requests import RoundRecord
from tests.collect.rounds import move, random_record
from tests.collect.sets import writer
from tests.kernels.helpers import no_sync

__all__ = ["writer"]  # a fixture

POISON = 0xAB


class Copy:
    """One copy under way; the device reads its source whenever it pleases before `synchronize`
    returns, and has no claim on it: a source that is freed too early is caught."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self._source = target, weakref.ref(source)
        self._done = self.is_read = False

    def happen(self) -> None:
        if not self._done:
            source = self._source()
            assert source is not None, "a source was freed before the device had read it"
            self.target.copy_(source)
        self._done = True

    def synchronize(self) -> None:
        self.happen()
        self.is_read = True


@dataclass
class FakeLane(Lane):
    """Copies at once (`early`) or when somebody waits (`late`): both are what a device may do.

    Host memory is written anew once it was read, as pinned memory is.

    Attributes:
        on_copy: called before each copy.
        handed, behind: marks that were given out, and those that work was enqueued behind.
    """

    early: bool = False
    on_copy: Callable[[], None] = lambda: None
    handed: list[Event] = field(default_factory=list)
    behind: list[Event] = field(default_factory=list)
    overlaps: bool = True
    _copies: list[Copy] = field(default_factory=list)

    def mark(self) -> Event:
        mark = Copy(torch.empty(0), torch.empty(0))
        self.handed.append(mark)
        return mark

    @contextmanager
    def after(self, marks: Sequence[Event]) -> Iterator[None]:
        assert marks, "work beside a stream must stand behind some point of it"
        self.behind += marks
        yield

    def host_bytes(self, size_bytes: int) -> Tensor:
        for copy in self._copies:
            if copy.is_read:
                copy.target.fill_(POISON)
        self._copies = [copy for copy in self._copies if not copy.is_read]
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        self.on_copy()
        copy = Copy(target, source)
        self._copies.append(copy)
        if self.early:
            copy.happen()
        return copy


class Gate:
    """A device that gets no further until it is opened."""

    def __init__(self) -> None:
        self.open = Flag()

    def lane(self) -> FakeLane:
        return FakeLane(on_copy=self._wait)

    def _wait(self) -> None:
        assert self.open.wait(30)


# --------------------------------------------------------------------------- the recorder

LIMITS = {"flush_s": 0.0, "wake_s": 0.001, "wake_items": 1}
MAX_ROUNDS = 2


def config(**changes: object) -> RecorderConfig:
    return RecorderConfig(**{**LIMITS, "max_items": MAX_ROUNDS, **changes})  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def decode(recorder: TraceRecorder, prompt_id: str, count: int) -> None:
    for step in range(count):
        recorder.on_round(random_record([prompt_id], step))


def round_keys(writer: TraceWriter) -> list[tuple[str, int]]:
    rounds = TraceSet.open(writer.place.name).scan("rounds").collect()
    return sorted(
        zip(*(rounds[name].to_list() for name in ("prompt_id", "round_idx")), strict=True)
    )


def test_recorder_commits_while_decoding_goes_on(writer: TraceWriter) -> None:
    acked: list[Segment] = []
    with TraceRecorder(writer, config(), acked.append) as recorder:
        recorder.on_round(random_record(["a"]))
        recorder.finish_prompt("a")
        for step in range(2000):
            recorder.on_round(random_record(["b"], step, depth=1, top_k=1, num_tokens=2))
            if acked:
                break
        assert [commit.prompt_ids for commit in acked] == [("a",)]


def test_error_of_the_thread_surfaces_in_the_decoding_thread(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its writer, and of the device that it reads."""

    def fail() -> None:
        raise RuntimeError("the device is gone")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    for lane, error, words in (
        (FakeLane(), OutputError, "Input/output error"),
        (FakeLane(on_copy=fail), RuntimeError, "the device is gone"),
    ):
        recorder = TraceRecorder(writer, config(), lane=lane)
        recorder.on_round(random_record(["a"]))
        recorder.finish_prompt("a")
        recorder._thread.join(10)
        with pytest.raises(error, match=words):
            recorder.on_round(random_record(["b"]))
        with pytest.raises(error, match=words):
            recorder.close()
    assert read_listing(writer.place.name).segments == ()


def rounds_of_two(device: str = "cpu") -> list[RoundRecord]:
    found = [random_record(["a", "b"], step, seed=step, num_tokens=5 + step) for step in range(9)]
    return [move(record, torch.device(device)) for record in found]


def check_written(
    writer: TraceWriter, records: list[RoundRecord], lane: Lane | None, max_items: int = MAX_ROUNDS
) -> None:
    """A recorder writes the trees of these rounds, bit for bit."""
    with TraceRecorder(writer, config(max_items=max_items), lane=lane) as recorder:
        for record in records:
            recorder.on_round(record)
        recorder.finish_prompt("a")
        recorder.finish_prompt("b")
    found = TraceSet.open(writer.place.name).scan("nodes").collect().sort("request_id", "round_idx")
    assert len(found) == sum(2 * record.pool.num_slots for record in records)
    for row, prompt in enumerate(("a/0", "b/0")):
        for step, record in enumerate(records):
            mine = found.filter(request_id=prompt, round_idx=step).sort("node_idx")
            assert mine["token_id"].to_list() == record.pool.token_ids[row].tolist()
            assert mine["joint_logp"].to_list() == record.pool.joint_logp[row].tolist()


@pytest.mark.parametrize("early", [False, True])
def test_rows_do_not_depend_on_when_the_device_copies(writer: TraceWriter, *, early: bool) -> None:
    lane = FakeLane(early)
    check_written(writer, rounds_of_two(), lane)
    assert lane.behind == lane.handed, "every round is read behind its own mark, in order"


PARCEL = transfer.Parcel
MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "a source freed too early": (transfer, "Parcel", lambda *given: PARCEL(*given[:-1], ())),
    "no wait": (transfer, "Parcel", lambda a, b, c, _, e: PARCEL(a, b, c, Ready(), e)),
    "rows left in host memory of the lane": (torch.Tensor, "clone", lambda tensor: tensor),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises((AssertionError, RuntimeError)):  # torch refuses indices of any bytes
        check_written(writer, rounds_of_two(), FakeLane())


def test_block_waits_and_keeps_memory_bounded(writer: TraceWriter) -> None:
    """Rounds alive, whoever holds them, never pass the bound and the one that is offered."""
    gate, alive, most = Gate(), weakref.WeakSet(), []
    lane = gate.lane()
    count = 30

    def produce() -> None:
        for step in range(count):
            record = random_record(["a"], step, depth=1, top_k=1, num_tokens=2)
            alive.add(record.pool.parent)
            most.append(len(alive))
            recorder.on_round(record)
        recorder.finish_prompt("a")

    recorder = TraceRecorder(writer, config(), lane=lane)
    thread = Thread(target=produce)
    thread.start()
    until(lambda: len(most) == MAX_ROUNDS + 1)  # two are queued, the third is offered
    assert thread.is_alive()
    gate.open.set()
    thread.join()
    recorder.close()
    assert max(most) <= MAX_ROUNDS + 2  # one more: the frame of `produce` holds its last record
    assert round_keys(writer) == [("a", step) for step in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_every_finished_prompt_is_committed_whole(writer: TraceWriter, seed: int) -> None:
    chance = random.Random(seed)
    lane = FakeLane(early=bool(seed % 2), on_copy=lambda: time.sleep(chance.random() / 500))
    offered: dict[str, int] = {}
    finished: set[str] = set()
    with TraceRecorder(writer, config(), lane=lane) as recorder:
        waiting = [f"p{n}" for n in range(40)]
        active = [waiting.pop(0) for _ in range(3)]
        while active:
            steps = [offered.setdefault(prompt, 0) for prompt in active]
            record = random_record(active, depth=1, top_k=2, num_tokens=3)
            record.round_idx[:] = torch.tensor(steps)
            recorder.on_round(record)
            for prompt in active[:]:
                offered[prompt] += 1
                if chance.random() < 0.3:
                    active.remove(prompt)
                    if waiting:
                        active.append(waiting.pop(0))
                    if chance.random() < 0.9:
                        recorder.finish_prompt(prompt)
                        finished.add(prompt)
    assert set(TraceSet.open(writer.place.name).prompt_ids) == finished
    assert set(recorder.discarded) == offered.keys() - finished != set()
    assert round_keys(writer) == sorted((p, step) for p in finished for step in range(offered[p]))


def test_rows_of_an_endless_prompt_are_an_error_or_dropped(writer: TraceWriter) -> None:
    recorder = TraceRecorder(writer, config(held_bytes=20_000))
    with pytest.raises(OutputError, match=r"unfinished prompts take .* more than 20000"):
        decode(recorder, "endless", 10_000)
    with pytest.raises(OutputError, match="unfinished prompts"):
        recorder.close()


def test_large_rounds_do_not_wait_for_each_other(writer: TraceWriter) -> None:
    """Of a size above the bound two have room: one is read while the next is decoded."""
    gate = Gate()
    recorder = TraceRecorder(writer, config(max_bytes=1, max_items=256), lane=gate.lane())
    recorder.on_round(random_record(["a"], 0))
    recorder.on_round(random_record(["a"], 1))  # does not wait: the gate is shut
    gate.open.set()
    recorder.finish_prompt("a")
    recorder.close()
    assert round_keys(writer) == [("a", 0), ("a", 1)]


@pytest.mark.cuda
def test_a_recorder_never_waits_for_a_device(writer: TraceWriter) -> None:
    """Neither of its threads; the device lags behind."""
    records = rounds_of_two("cuda")
    torch.cuda._sleep(100_000_000)
    with no_sync():
        check_written(writer, records, None, max_items=len(records))
