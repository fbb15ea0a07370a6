"""Writers that are killed, starved and lied to, and what must be true of their set afterwards.

The oracle is this process: what must be there is known only from the acknowledgements that came
through a pipe, never from the set itself. scripts/inject_faults.py runs the long campaigns.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from specctl.collect.chains import Damage
from specctl.collect.header import read_header
from specctl.collect.opening import open_log
from specctl.collect.places import open_place, split_reference
from specctl.collect.quarantine import note_damages, put_in_quarantine
from specctl.collect.reader import TraceSet
from specctl.collect.shards import WHOLE, Shard
from specctl.collect.snapshots import take_snapshot
from specctl.collect.store import TraceWriter
from specctl.errors import OutputError, StoreError, TraceError
from tests.collect.rounds import header
from tests.collect.shim import Death, Mode, Shim
from tests.collect.small_rows import NUM_NODES, NUM_ROUNDS, tables_of

PLANNED = ("a", "b")
"""Prompts of a short life, one commit each."""


def forkserver() -> BaseContext:
    """Processes that start at once and share no thread with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.collect.faults", "pyarrow.parquet"])
    return context


# --------------------------------------------------------------------------- one short life


def live(root: Path, shim: Shim, on_ack: Callable[[str], None]) -> None:
    """Opens a set and commits two prompts, with something going wrong on the way."""
    try:
        with shim.installed(), TraceWriter.open(root, header(), resume=True) as writer:
            for prompt in writer.pending(PLANNED):
                writer.commit([prompt], tables_of([prompt]))
                on_ack(prompt)
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
    """Messages until the process is gone."""
    while True:
        try:
            yield receiver.recv()
        except (EOFError, OSError):
            return


def simulated_life(root: Path, mode: Mode, at: int) -> Life:
    """A life in this process, whose death is an exception that nothing catches."""
    shim, acked = Shim(mode, at), []
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
        check_acked(root, set(life.acked))
        finish(root)
        if life.hit is None and life.count is not None:
            return life.count
        shutil.rmtree(root)
        at += step


def finish(root: Path) -> None:
    """What `--resume` does: decode what is pending, and then everything is there once."""
    with TraceWriter.open(root, header(), resume=True) as writer:
        for prompt in writer.pending(PLANNED):
            writer.commit([prompt], tables_of([prompt]))
    log = open_log(root)
    assert sorted(log.prompt_ids) == sorted(PLANNED)
    num_rows = len(PLANNED) * (NUM_ROUNDS + NUM_NODES)
    assert sum(commit.num_rows for commit in log.commits) == num_rows


def check_set(root: Path, acked: set[str], planned: set[str]) -> None:
    """Nothing acknowledged is missing, nothing is double, and every file in `data/` is whole."""
    if not (root / "trace.json").exists():
        assert not acked
        return
    traces = TraceSet.open(root)
    committed = traces.prompt_ids
    assert len(set(committed)) == len(committed)
    assert acked <= set(committed) <= planned
    counts = traces.scan("rounds").group_by("prompt_id").len().collect()
    assert dict(counts.iter_rows()) == dict.fromkeys(committed, NUM_ROUNDS)
    assert traces.num_rows("nodes") == len(committed) * NUM_NODES
    for path in (root / "data").glob("*"):
        pq.ParquetFile(path)  # orphans are whole too: published files always are


# --------------------------------------------------------------------------- many, killed at random


def work(root: Path, shard: Shard, told: Connection) -> None:
    """Commits prompts of its own without end, and tells before and after each."""
    torch.set_num_threads(1)
    with TraceWriter.open(root, header(), resume=True, shard=shard) as writer:
        for number in range(len(writer.committed), 1_000_000):
            prompt = f"{shard.index}-{number}"
            if prompt in writer.committed:
                continue
            tables = tables_of([prompt])
            told.send(("begin", prompt))
            writer.commit([prompt], tables)
            told.send(("acked", prompt))


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
        it began to commit."""
        context, draw = forkserver(), random.Random(self.seed)
        running = [Victim(context, self, index) for index in range(1, self.num_writers + 1)]
        for kill in range(num_kills):
            victim = running[draw.randrange(self.num_writers)]
            if draw.random() < 0.75:
                victim.wait_until_busy()
            time.sleep(draw.uniform(0.0, 0.05))
            for writer in running:
                writer.listen()
            self.num_within += victim.kill()
            self.num_kills += 1
            running[victim.index - 1] = Victim(context, self, victim.index)
            if kill % check_every == check_every - 1:
                check_acked(self.root, self.acked)
        for writer in running:
            writer.kill()
        check_acked(self.root, self.acked, reads_rows=True)


class Victim:
    """One writer's process, as its parent knows it."""

    def __init__(self, context: BaseContext, campaign: Campaign, index: int) -> None:
        self.index, self._campaign, self._last = index, campaign, "started"
        self._said, sender = context.Pipe(duplex=False)
        shard = Shard(index, campaign.num_writers)
        self._process = context.Process(target=work, args=(campaign.root, shard, sender))  # type: ignore[attr-defined]
        self._process.start()
        sender.close()

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


def check_acked(root: Path, acked: set[str], *, reads_rows: bool = False) -> None:
    """The laws of a set that may not be finished: records and digests, and the rows if asked."""
    if not (root / "trace.json").exists():
        assert not acked
        return
    committed = open_log(root).prompt_ids
    assert len(set(committed)) == len(committed)
    assert acked <= set(committed)
    if reads_rows:
        check_set(root, acked, set(committed))


# --------------------------------------------------------------------------- bytes that change


def small_set(root: Path) -> Path:
    """Two commits; the first file of the first one is what gets damaged. Returns that file."""
    with TraceWriter.open(root, header(), shard=WHOLE) as writer:
        commit = writer.commit(["a"], tables_of(["a"]))
        writer.commit(["b"], tables_of(["b"]))
    return min((s.path(root) for s in commit.files), key=lambda path: path.stat().st_size)


def check_damage_is_named(root: Path, path: Path, content: bytes) -> None:
    """Puts other bytes in a file's place: it is named, and the other commit stays readable."""
    path.write_bytes(content)
    log = open_log(root, damaged="skip")
    assert log.prompt_ids == ("b",)
    assert path.name in log.damages[0].reason


def truncations(whole: bytes) -> Iterator[bytes]:
    """At every byte, and the same with zeros in the place of the lost end."""
    for length in range(len(whole)):
        yield whole[:length]
        yield whole[:length] + bytes(len(whole) - length)


def bit_flips(whole: bytes, step: int = 1) -> Iterator[bytes]:
    """Every n-th one-bit change of some bytes."""
    for place in range(0, 8 * len(whole), step):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        yield bytes(content)


def flip_records(folder: Path, step: int = 1) -> dict[str, int]:
    """Flips bits of what is not a segment: nothing of a set may pass with another bit.

    Returns:
        The number of flips, by kind of record.
    """
    root = folder / "flips"
    small_set(root)
    [log] = (root / "commits").iterdir()
    taken = take_snapshot(open_log(root))
    snapshot = root / "snapshots" / f"{taken.digest[7:]}.txt"
    told = {
        "header": _flip(root / "trace.json", step, lambda: _is_refused(root)),
        "record": _flip(log / "00000001.json", step, lambda: _is_refused(root)),
        "newest record": _flip(log / "00000002.json", step, lambda: _is_refused(root)),
        "snapshot": _flip(snapshot, step, lambda: _is_refused(taken.reference)),
        "header of a snapshot": _flip(
            root / "trace.json", step, lambda: _is_refused(taken.reference)
        ),
    }
    commit = open_log(root).commits[0]
    put_in_quarantine(open_place(root), Damage(commit.files[0].key, "r", commit.digest, 1))
    [note] = (root / "quarantine").iterdir()
    return told | {"note": _flip(note, step, lambda: _is_kept_and_told(root, note))}


def _flip(path: Path, step: int, holds: Callable[[], bool]) -> int:
    whole, count = path.read_bytes(), 0
    for content in bit_flips(whole, step):
        path.write_bytes(content)
        assert holds(), f"{path}: {content!r}"
        count += 1
    path.write_bytes(whole)
    return count


def _is_refused(reference: Path | str) -> bool:
    try:
        read_header(open_place(split_reference(reference)[0]))
        open_log(reference, verify=False)
    except TraceError:
        return True
    return False


def _is_kept_and_told(root: Path, note: Path) -> bool:
    """A note that changed still leaves its commit out, and is named."""
    told = note_damages(open_place(root))
    return _is_refused(root) and [Path(damage.what).name for damage in told] == [note.name]


def flipped(whole: bytes, draw: random.Random) -> bytes:
    """One bit is another."""
    content = bytearray(whole)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)
