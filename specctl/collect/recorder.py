"""The live recorder: an observer of the runtime that writes traces from background threads.

    decoding thread          recording thread                       writing thread
    on_round(record)  ──►    statistics on the round's device ──►
    finish_prompt(id) ──►    to the host, logits dropped            every `flush_s`:
                             rows held until finished        ──►    to_tables, commit

The decoding thread marks its place in the device's work and appends to a queue; it never waits for
a device. Rounds of a prompt stay in memory, about 70 bytes a drafted node, until it is finished,
because a prompt is published whole or not at all. Everything that waits is bounded, and `when_full`
says what happens at a bound: decoding waits, or whole prompts are dropped and counted. A dropped
prompt is not published, so `--resume` collects it again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from threading import Condition, Thread
from typing import NamedTuple, Self

import torch

from specctl.collect.config import WhenFull
from specctl.collect.round_rows import (
    Heading,
    HeldRows,
    RoundRows,
    alike,
    headings,
    join,
    statistics,
    to_tables,
)
from specctl.collect.shipping import Event, Lane, Shipping, lane_for
from specctl.collect.trace_writer import FLUSH_BYTES, FLUSH_S, TraceWriter, finishing
from specctl.errors import OutputError
from specctl.logs.trace_files import Segment
from specctl.runtime.requests import RoundRecord

MIN_ROUNDS = 2
"""Rounds that may wait whatever their size: one is read while the next is decoded."""


@dataclass(frozen=True)
class RecorderConfig:
    """When to publish and how much may wait.

    Attributes:
        flush_s: seconds between segments while finished prompts wait: what a kill may cost.
        flush_bytes: publish earlier when this much is held in memory.
        when_full: what happens at a bound: `block` lets decoding wait, `drop` costs the prompts
            whose rounds find no room.
        max_rounds, max_bytes: bounds of the queue, bytes of logits on the rounds' device; two
            rounds always have room.
        copy_bytes: bound of the host memory that copies go to, pinned on CUDA.
        held_bytes: bound of the rows that wait for their prompt's end or for the disk. No waiting
            helps against it where a single prompt outgrows it: an error under `block`.
        wake_s, wake_rounds: how long, and for how many rounds, the recording thread sleeps at
            most. A thread woken for each round would contend for the interpreter lock.
    """

    flush_s: float = FLUSH_S
    flush_bytes: int = FLUSH_BYTES
    when_full: WhenFull = "block"
    max_rounds: int = 256
    max_bytes: int = 256 << 20
    copy_bytes: int = 64 << 20
    held_bytes: int = 2 << 30
    wake_s: float = 0.25
    wake_rounds: int = 16


class Losses(NamedTuple):
    """Dropped prompts, and their rounds, one a request in a round, as in `rounds`."""

    num_prompts: int = 0
    num_rounds: int = 0


class Waiting(NamedTuple):
    """A round in the queue; `mark` is where the decoding stream has written all of it."""

    record: RoundRecord
    mark: Event


Item = Waiting | str
"""A round, or the id of a prompt whose rounds were all seen."""


@dataclass
class RoundQueue:
    """A bounded queue from the decoding thread to the recording one, first in, first out.

    A round holds whole logits until its statistics have left the device, so it counts until it is
    released, not until it is taken.

    Attributes:
        sizes: bytes of the rounds that wait or were taken. num_taken: of them.
    """

    config: RecorderConfig
    sizes: list[int] = field(default_factory=list)
    num_taken: int = 0
    _items: list[Item] = field(default_factory=list)
    _closed: bool = False
    _failure: BaseException | None = None
    _changed: Condition = field(default_factory=Condition)

    def put(self, item: Item, size_bytes: int | None = None) -> bool:
        """Appends an item; returns whether it found room, for which `block` waits.

        Args:
            size_bytes: of a round; other items always have room.

        Raises:
            BaseException: the error that the recording thread failed with.
            OutputError: the queue was closed.
        """
        with self._changed:
            while size_bytes is not None and not self._closed and not self._has_room(size_bytes):
                self._changed.notify_all()
                if self.config.when_full == "drop":
                    return False
                self._changed.wait()
            self.raise_failure()
            if self._closed:
                raise OutputError(
                    "trace recorder: expected an open recorder, found one that was closed",
                    hint="record rounds inside its `with` block",
                )
            self._items.append(item)
            self.sizes += [] if size_bytes is None else [size_bytes]
            is_long = len(self._items) >= self.config.wake_rounds
            if is_long or 2 * sum(self.sizes) >= self.config.max_bytes:
                self._changed.notify_all()
            return True

    def _has_room(self, size_bytes: int) -> bool:
        fits = sum(self.sizes) + size_bytes <= self.config.max_bytes
        return len(self.sizes) < MIN_ROUNDS or (fits and len(self.sizes) < self.config.max_rounds)

    def take(self) -> tuple[list[Item], bool]:
        """Everything that waits, after at most `wake_s`, and whether more may come."""
        with self._changed:
            if not self._closed and len(self._items) < self.config.wake_rounds:
                self._changed.wait(self.config.wake_s)
            items, self._items = self._items, []
            self.num_taken = len(self.sizes)
            return items, not self._closed

    def release(self) -> None:
        """The rounds that were taken are gone: there is room for as many again."""
        with self._changed:
            del self.sizes[: self.num_taken]
            self.num_taken = 0
            self._changed.notify_all()

    def close(self, failure: BaseException | None = None) -> None:
        """No more items. A failure of the recording thread surfaces at the next `put`."""
        with self._changed:
            self._closed, self._failure = True, failure or self._failure
            self._changed.notify_all()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class TraceRecorder:
    """Records rounds into a `TraceWriter`, whole prompts at a time.

    Use it as a context manager: leaving it, by Ctrl-C too, publishes the finished prompts and
    discards the others. An error of a background thread is raised in the decoding thread, at the
    next call and at `close`.

    Args:
        on_commit: called in the writing thread, behind each segment.
        lane: to the host; that of the first round's device unless given.

    Attributes:
        discarded: prompts seen but not finished, known after `close`.
        losses: what a bound cost, complete after `close`.
    """

    def __init__(
        self,
        writer: TraceWriter,
        config: RecorderConfig | None = None,
        on_commit: Callable[[Segment], None] | None = None,
        lane: Lane | None = None,
    ) -> None:
        self.discarded: tuple[str, ...] = ()
        self.losses = Losses()
        self._writer, self._on_commit, self._lane = writer, on_commit, lane
        self._config = config or RecorderConfig()
        self._queue = RoundQueue(self._config)
        self._num_offered: Counter[str] = Counter()  # rounds of each prompt, decoding thread's
        self._dropped: set[str] = set()  # both threads add; nothing leaves
        self._held = HeldRows()  # recording thread's, like the next five
        self._finished: set[str] = set()
        self._shipping: Shipping[list[Heading]] | None = None
        self._write: Future[None] | None = None
        self._writing_bytes = 0
        self._written_at = time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specctl-commits")
        self._thread = Thread(target=self._run, name="specctl-recorder", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------- decoding thread

    def on_round(self, record: RoundRecord) -> None:
        """Enqueues a round; waits only where the queue is full and `when_full` says so."""
        if self._lane is None:
            self._lane = lane_for(record.target_logits.device)
        prompts = [request.prompt_id for request in record.requests]
        self._num_offered.update(prompts)
        if self._dropped.issuperset(prompts):
            return
        logits = {id(one): one for one in (record.target_logits, record.target_logp_source)}
        size_bytes = sum(one.nbytes for one in logits.values())
        if not self._queue.put(Waiting(record, self._lane.mark()), size_bytes):
            self._dropped.update(prompts)  # all of the batch, as prompts are traced whole

    def finish_prompt(self, prompt_id: str) -> None:
        """All rounds of a prompt were seen: unless dropped, it goes into the next segment."""
        self._queue.put(prompt_id)

    def close(self) -> None:
        """Publishes what is finished and ends the threads; see `finishing` for Ctrl-C meanwhile.

        Raises:
            SpecctlError: the error that a background thread failed with.
        """
        with finishing():
            self._queue.close()
            self._thread.join()
        lost = [count for prompt, count in self._num_offered.items() if prompt in self._dropped]
        self.losses = Losses(len(lost), sum(lost))
        self._queue.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ----------------------------------------------------------------- recording thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._record()
        except BaseException as error:  # handed over, and raised in the decoding thread
            self._queue.close(error)
        finally:
            self._pool.shutdown()

    def _record(self) -> None:
        more = True
        while more:
            items, more = self._queue.take()
            self._held.parts += self._read([item for item in items if isinstance(item, Waiting)])
            self._held.take(frozenset(self._dropped))
            # A prompt ends after its last round, so the order of the queue is kept.
            self._finished |= {item for item in items if isinstance(item, str)} - self._dropped
            items.clear()  # the last that holds on to logits
            self._queue.release()
            if self._write is not None and self._write.done():
                self._wait()
            waited_s = time.monotonic() - self._written_at
            is_due = (
                waited_s >= self._config.flush_s
                or self._held.size_bytes >= self._config.flush_bytes
            )
            if self._write is None and is_due:
                self._begin_write()
            self._keep_bounds()
        self._begin_write()
        self._wait()
        self.discarded = tuple(sorted(self._held.counts()))

    def _read(self, waiting: list[Waiting]) -> list[RoundRows]:
        """Statistics of rounds, on the host; until then `waiting` keeps what the device reads."""
        if not waiting or self._lane is None:
            return []
        shipping = self._shipping = self._shipping or Shipping(self._lane, self._config.copy_bytes)
        landed, marks = [], iter([item.mark for item in waiting])
        for records in alike(item.record for item in waiting):
            with shipping.lane.after(list(islice(marks, len(records)))):
                landed += shipping.send(statistics(records), headings(records))
        landed += shipping.land()
        return [RoundRows(*parcel) for parcel in landed]

    def _begin_write(self) -> None:
        """Starts to write the finished prompts, once the segment before is through."""
        if not self._finished:
            return
        self._wait()
        finished, self._finished = self._finished, set()
        rows = self._held.take(finished)
        self._writing_bytes = sum(part.size_bytes for part in rows)
        self._written_at = time.monotonic()
        self._write = self._pool.submit(self._publish, finished, rows)

    def _publish(self, prompt_ids: set[str], rows: list[RoundRows]) -> None:
        with torch.inference_mode():
            tables = to_tables(join(rows)) if rows else {}
        segment = self._writer.commit(prompt_ids, tables)
        if self._on_commit is not None:
            self._on_commit(segment)

    def _wait(self) -> None:
        """Returns when nothing is being written; raises the error that writing failed with."""
        write, self._write = self._write, None
        if write is not None:
            write.result()
        self._writing_bytes = 0

    def _keep_bounds(self) -> None:
        """Gets the rows below their bound: by the disk, and else as `when_full` says."""
        while self._held.size_bytes + self._writing_bytes > self._config.held_bytes:
            if self._writing_bytes:
                self._wait()
            elif self._finished:
                self._begin_write()
            elif self._config.when_full == "drop":
                [(prompt_id, _)] = self._held.counts().most_common(1)
                self._dropped.add(prompt_id)
                self._held.take(frozenset(self._dropped))
            else:
                raise OutputError(
                    "trace recorder: expected unfinished prompts of at most "
                    f"{self._config.held_bytes} bytes, found {self._held.size_bytes} bytes",
                    hint=(
                        "decode fewer prompts together, or shorter ones, or drop what is too long"
                    ),
                )
