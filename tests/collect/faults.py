"""Writers that are killed, starved and lied to, and what must be true of their set afterwards.

The oracle is this process: it knows what must be there from acknowledgements that came through a
pipe, never from the set itself. scripts/inject_faults.py runs the long campaigns.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.collect.trace_writer import TraceWriter
from specctl.collect.verifying import take_snapshot
from specctl.errors import OutputError, StoreError, TraceError
from specctl.logs.trace_set import TraceSet, read_listing
from tests.collect.power import Recorder, states
from tests.collect.rounds import header
from tests.collect.sets import NUM_NODES, NUM_ROUNDS, tables_of
from tests.collect.shim import Death, Mode, Shim

PLANNED = ("a", "b")
"""Prompts of a short life, one segment each."""
tables_of(PLANNED)  # so that processes that are about to die need not make the rows


def forkserver() -> BaseContext:
    """Processes that start at once and share no thread with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.collect.faults", "pyarrow.parquet"])
    return context


def check_set(reference: Path | str, acked: set[str], planned: set[str] | None = None) -> None:
    """Nothing acknowledged is missing, nothing counts twice, and every row can be read."""
    if isinstance(reference, Path) and not (reference / "trace.json").exists():
        assert not acked
        return
    traces = TraceSet.open(reference)
    finished = traces.prompt_ids
    assert len(set(finished)) == len(finished)
    assert acked <= set(finished)
    assert planned is None or set(finished) <= planned
    counts = traces.scan("rounds").group_by("prompt_id").len().collect()
    assert dict(counts.iter_rows()) == dict.fromkeys(finished, NUM_ROUNDS)
    assert traces.scan("nodes").collect().height == len(finished) * NUM_NODES
    assert traces.num_rows("nodes") == len(finished) * NUM_NODES


def finish(root: Path) -> None:
    """What `--resume` does: decode what is pending, and then everything is there once."""
    with TraceWriter.open(root, header(), resume=True) as writer:
        for prompt in pending(writer):
            writer.commit([prompt], tables_of([prompt]))
    check_set(root, set(PLANNED), set(PLANNED))


# --------------------------------------------------------------------------- one short life

OnAck = Callable[[str], None]


def pending(writer: TraceWriter) -> list[str]:
    return [prompt for prompt in PLANNED if prompt not in writer.finished]


def publish(writer: TraceWriter, prompts: Sequence[str], on_ack: OnAck) -> None:
    for prompt in prompts:
        writer.commit([prompt], tables_of([prompt]))
        on_ack(prompt)


def live(root: Path, shim: Shim, on_ack: OnAck) -> None:
    """Opens a set and publishes two prompts, with something going wrong on the way."""
    try:
        with shim.installed(), TraceWriter.open(root, header(), resume=True) as writer:
            publish(writer, pending(writer), on_ack)
    except (OutputError, StoreError):
        return  # said so, and stopped: what a fault must lead to


def live_and_tell(root: Path, mode: Mode, at: int, told: Connection) -> None:
    """The same, in a process of its own."""
    torch.set_num_threads(1)
    shim = Shim(mode, at)
    live(root, shim, told.send)
    told.send((shim.count, shim.hit))


@dataclass(frozen=True)
class Life:
    """acked: prompts. count: operations, None where it died. hit: the one that went wrong."""

    acked: list[str]
    count: int | None
    hit: str | None


def run_life(context: BaseContext, root: Path, mode: Mode, at: int) -> Life:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=live_and_tell, args=(root, mode, at, sender))  # type: ignore[attr-defined]
    process.start()
    sender.close()
    messages = list(received(receiver))
    process.join()
    ended = [message for message in messages if isinstance(message, tuple)]
    count, hit = ended[0] if ended else (None, None)
    return Life([message for message in messages if isinstance(message, str)], count, hit)


def received(receiver: Connection) -> Iterator[Any]:
    while True:
        try:
            yield receiver.recv()
        except (EOFError, OSError):
            return


def simulated_life(root: Path, mode: Mode, at: int) -> Life:
    """A life in this process, whose death is an exception that nothing catches."""
    shim, acked = Shim(mode, at), list[str]()
    with suppress(Death):
        live(root, shim, acked.append)
    return Life(acked, None if shim.hit else shim.count, shim.hit)


def fail_everywhere(folder: Path, run: Callable[[Path, int], Life], step: int = 1) -> int:
    """One life for each operation; checks the set after each, goes on with it, checks again.

    Args:
        run: a life in which the given operation goes wrong. step: take every n-th alone.

    Returns:
        The number of operations.
    """
    at = 0
    while True:
        root = folder / str(at)
        life = run(root, at)
        check_set(root, set(life.acked), set(PLANNED))
        finish(root)
        if life.hit is None and life.count is not None:
            return life.count
        shutil.rmtree(root)
        at += step


# --------------------------------------------------------------------------- many, killed at random


PROMPTS_OF_A_KILL = 4
"""How many each writer may publish between two kills: a fast machine makes the set no larger."""


def work(root: Path, index: int, parent: Connection) -> None:
    """Publishes a prompt whenever its parent says so, and tells before and after each.

    Every third prompt is one that all writers take, as if they knew nothing of each other.
    """
    torch.set_num_threads(1)
    with TraceWriter.open(root, header(), resume=True) as writer:
        for number in range(1_000_000):
            prompt = f"all-{number}" if number % 3 == 0 else f"{index}-{number}"
            if prompt in writer.finished:
                continue
            tables = tables_of([prompt])
            parent.recv()
            parent.send(("begin", prompt))
            writer.commit([prompt], tables)
            parent.send(("acked", prompt))


@dataclass
class Campaign:
    """Writers of one set, killed and started again.

    Attributes:
        acked: by the writers' own word. num_within: kills between a commit's begin and its end.
    """

    root: Path
    num_writers: int
    seed: int
    acked: set[str] = field(default_factory=set)
    num_kills: int = 0
    num_within: int = 0

    def run(self, num_kills: int, check_every: int) -> None:
        """A quarter of the kills come as they come, also while a writer starts; the others after
        it began to publish."""
        context, draw = forkserver(), random.Random(self.seed)
        running = [Victim(context, self, index) for index in range(self.num_writers)]
        for kill in range(num_kills):
            victim = running[draw.randrange(self.num_writers)]
            for writer in running:
                writer.go_on()
            if draw.random() < 0.75:
                victim.wait_until_busy()
            time.sleep(draw.uniform(0.0, 0.05))
            for writer in running:
                writer.listen()
            self.num_within += victim.kill()
            self.num_kills += 1
            running[victim.index] = Victim(context, self, victim.index)
            if kill % check_every == check_every - 1:
                assert self.acked <= set(read_listing(self.root).prompt_ids)
        for writer in running:
            writer.kill()
        check_set(self.root, self.acked)

    @property
    def num_repeats(self) -> int:
        """Prompts that several writers finished."""
        return read_listing(self.root).num_repeats


class Victim:
    """One writer's process, as its parent knows it."""

    def __init__(self, context: BaseContext, campaign: Campaign, index: int) -> None:
        self.index, self._campaign, self._last = index, campaign, "started"
        self._said, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(campaign.root, index, theirs))  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()

    def go_on(self) -> None:
        for _ in range(PROMPTS_OF_A_KILL):
            self._said.send("go on")

    def wait_until_busy(self) -> None:
        self.listen()
        assert self._last != "started" or self._said.poll(60)

    def listen(self) -> None:
        """Takes what it has said so far: a pipe that is full would hold it up."""
        while self._said.poll():
            try:
                self._hear(self._said.recv())
            except (EOFError, OSError):
                return

    def kill(self) -> bool:
        """Kills it; whether that was within a commit."""
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL, "it had ended by itself"
        for message in received(self._said):
            self._hear(message)
        return self._last == "begin"

    def _hear(self, message: tuple[str, str]) -> None:
        self._last, prompt = message
        if self._last == "acked":
            self._campaign.acked.add(prompt)


# --------------------------------------------------------------------------- lost power


def survive_power_loss(folder: Path, lies: str = "", segments: int = 2) -> int:
    """Records a writer's life, and opens every state that a power loss may leave of it.

    Args:
        lies: see `Recorder`.

    Returns:
        The number of states; fails where an acknowledged prompt is gone or the set cannot be read.
    """
    root, planned = folder / "set", "abcdefgh"[:segments]
    recorder = Recorder(root, lies)
    root.mkdir(parents=True)
    with recorder.installed(), TraceWriter.open(root, header()) as writer:
        publish(writer, planned, recorder.ack)
    seen = set()
    for state in states(recorder.events):
        key = (state.acked, state.folders, tuple(sorted(state.files.items())))
        if key not in seen:
            seen.add(key)
            state.write(folder / "after")
            check_set(folder / "after", set(state.acked), set(planned))
            shutil.rmtree(folder / "after")
    return len(seen)


# --------------------------------------------------------------------------- bytes that change


def damage_everywhere(
    root: Path, draw: random.Random, num_flips: int, num_cuts: int | None = None
) -> dict[str, int]:
    """Truncates and flips every file of a set, one at a time: each is refused by name.

    Args:
        root: a set of two segments. num_flips, num_cuts: of each file; None cuts at every byte.

    Returns:
        The number of refusals, by kind of file.
    """
    taken = take_snapshot(read_listing(root))
    told: dict[str, int] = {}
    for path in sorted(root.rglob("*")):
        if not path.is_file():
            continue
        kind = path.parent.name if path.parent != root else path.name
        reference = taken.reference if kind == "snapshots" else str(root)
        whole = path.read_bytes()
        changed = list(truncations(whole))
        changed = changed if num_cuts is None else draw.sample(changed, num_cuts)
        for content in [*changed, *_flips(whole, draw, num_flips)]:
            if content != whole:
                path.write_bytes(content)
                check_refused(reference, path.name)
                told[kind] = told.get(kind, 0) + 1
        path.write_bytes(whole)
    TraceSet.open(taken.reference)
    return told


def check_refused(reference: str, name: str) -> None:
    """The set is refused, naming the file; without damaged segments the rest can be read."""
    with pytest.raises(TraceError, match=re.escape(name)):
        TraceSet.open(reference)
    if name.endswith(".parquet"):
        left = TraceSet.open(reference, skip_damaged=True)
        assert [len(left.prompt_ids), len(left.damages)] == [1, 1]
        assert name in left.damages[0].reason


def truncations(whole: bytes) -> Iterator[bytes]:
    """At every byte, and the same with zeros in the place of the lost end."""
    for length in range(len(whole)):
        yield whole[:length]
        yield whole[:length] + bytes(len(whole) - length)


def _flips(whole: bytes, draw: random.Random, count: int) -> Iterator[bytes]:
    places = range(8 * len(whole))
    for place in draw.sample(places, min(count, len(places))):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        yield bytes(content)
