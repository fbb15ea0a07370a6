"""The recorder of traces, for the decode loop, dense collection and serving engines.

    producing thread         recording thread                    writing thread
    put(item) ──► queue ──►  source.take: rows, held until  ──►  every `flush_s` or `flush_bytes`:
                             their prompt has ended               tables, a segment

A prompt is published whole or not at all. All that waits is bounded: at a full queue the producer
waits, or is told. The threads share Python's interpreter lock: items are taken many at a time, and
a single item wakes no thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch

from specctl.collect.trace_writer import FLUSH_BYTES, FLUSH_S, TraceWriter, finishing
from specctl.errors import OutputError
from specctl.logs.parquet import Tables
from specctl.logs.trace_files import Segment
from specctl.policy import Policy

MIN_ITEMS = 2
"""Items that may wait at any size: one is read while the next is made."""
I = TypeVar("I")  # noqa: E741


@dataclass(frozen=True)
class RecorderConfig:
    """Limits of a recorder: when to publish, and how much may wait.

    Attributes:
        flush_s: seconds between segments while finished prompts wait; a kill costs these.
        flush_bytes: new rows at which a segment is published earlier.
        waits: the producer waits at a full queue; else `put` returns False.
        max_items, max_bytes: bounds of the queue.
        held_bytes: bound of the rows that wait for the end of their prompt or for the disk;
            prompts above it are an error.
        wake_s, wake_items, wake_bytes: longest sleep of the recording thread, and what ends it.
        poll_s: seconds between looks at the queue. None: the item that reaches `wake_items` wakes
            the thread, which then takes the interpreter lock at once.
    """

    flush_s: float = FLUSH_S
    flush_bytes: int = FLUSH_BYTES
    waits: bool = True
    max_items: int = 256
    max_bytes: int = 256 << 20
    held_bytes: int = 2 << 30
    wake_s: float = 0.25
    wake_items: int = 16
    wake_bytes: int = 128 << 20
    poll_s: float | None = None


class Publication(NamedTuple):
    """Prompts that have ended, with all their rows."""

    prompt_ids: Collection[str]
    tables: Callable[[], Tables]  # called in the writing thread
    size_bytes: int  # of the rows
    policy: Policy | None = None  # that decoded them, if it is not the writer's own


class RowSource(Protocol[I]):
    """Makes rows of items and holds them until their prompts end; for the recording thread."""

    @property
    def held_bytes(self) -> int:
        """Memory of the rows that are held."""

    @property
    def has_ended(self) -> bool:
        """Whether some prompt waits to be published."""

    def take(self, items: list[I]) -> None:
        """Makes rows of items, in their order."""

    def publish(self) -> list[Publication]:
        """Hands out the prompts that have ended."""

    def unfinished(self) -> list[str]:
        """Prompts with rows that have not ended."""


@dataclass
class ItemQueue(Generic[I]):
    """A bounded FIFO queue from the producing to the recording thread.

    An item holds its memory until its rows are made: it counts until `release`.
    """

    config: RecorderConfig
    sizes: list[int] = field(default_factory=list)  # of items that wait or are being read
    num_taken: int = 0  # those being read
    _bytes: int = 0
    _items: list[I] = field(default_factory=list)
    _is_full: bool = False
    _closed: bool = False
    _failure: BaseException | None = None
    _changed: Condition = field(default_factory=Condition)

    def put(self, item: I, size_bytes: int | None = None) -> bool:
        """Appends an item once there is room; returns False if there is none and it never waits.

        Args:
            size_bytes: memory of the item; None always has room.

        Raises:
            BaseException: the error of the recording thread.
            OutputError: the queue was closed.
        """
        with self._changed:
            while size_bytes is not None and not self._closed and not self._has_room(size_bytes):
                self._is_full = True
                self._changed.notify_all()
                if not self.config.waits:
                    return False
                self._changed.wait()
            self.raise_failure()
            if self._closed:
                raise OutputError("the trace recorder is closed; record inside its `with` block")
            self._items.append(item)
            if size_bytes is not None:
                self.sizes.append(size_bytes)
                self._bytes += size_bytes
            if self.config.poll_s is None and self._has_enough():
                self._changed.notify_all()
            return True

    def _has_room(self, size_bytes: int) -> bool:
        fits = size_bytes == 0 or self._bytes + size_bytes <= self.config.max_bytes
        return len(self.sizes) < MIN_ITEMS or (fits and len(self.sizes) < self.config.max_items)

    def _has_enough(self) -> bool:
        is_long = len(self._items) >= self.config.wake_items
        return is_long or self._is_full or self._bytes >= self.config.wake_bytes

    def take(self) -> tuple[list[I], bool]:
        """All items that wait, after at most `wake_s`, and whether more may come."""
        with self._changed:
            until, poll_s = time.monotonic() + self.config.wake_s, self.config.poll_s
            while not (self._closed or self._has_enough()):
                if (left_s := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s if poll_s is None else min(left_s, poll_s))
            items, self._items, self._is_full = self._items, [], False
            self.num_taken = len(self.sizes)
            return items, not self._closed

    def release(self) -> None:
        """Makes room again for the items that were taken."""
        with self._changed:
            self._bytes -= sum(self.sizes[: self.num_taken])
            del self.sizes[: self.num_taken]
            self.num_taken = 0
            self._changed.notify_all()

    def close(self, failure: BaseException | None = None) -> None:
        """Ends the queue. A failure of the recording thread is raised at the next `put`."""
        with self._changed:
            self._closed, self._failure = True, failure or self._failure
            self._changed.notify_all()

    def clear(self) -> int:
        """Drops the items that wait; returns their number."""
        with self._changed:
            items, self._items, self.sizes = self._items, [], []
            self.num_taken = self._bytes = 0
            return len(items)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class Recorder(Generic[I]):
    """Publishes the rows of a source, whole prompts at a time, from its own threads.

    A context manager: its end, by Ctrl-C too, publishes the prompts that have ended. An error of a
    background thread is raised in the producing thread, at the next `put` and at `close`.

    Args:
        open_writer: opens the set; called in the recording thread.
        on_commit: called in the writing thread after each segment.

    Attributes:
        discarded: prompts that had not ended; complete after `close`.
        num_bytes: bytes published.
    """

    def __init__(
        self,
        open_writer: Callable[[], TraceWriter],
        source: RowSource[I],
        config: RecorderConfig | None = None,
        on_commit: Callable[[Segment], None] | None = None,
    ) -> None:
        self.config, self.source = config or RecorderConfig(), source
        self.discarded: tuple[str, ...] = ()
        self.num_bytes = 0
        self._open_writer, self._on_commit = open_writer, on_commit
        self._writer: TraceWriter | None = None
        self._queue: ItemQueue[I] = ItemQueue(self.config)
        self._write: Future[None] | None = None
        self._writing_bytes = self._left_bytes = 0
        self._written_at = time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specctl-commits")
        self._thread = Thread(target=self._run, name="specctl-recorder", daemon=True)
        self._thread.start()

    def put(self, item: I, size_bytes: int | None = None) -> bool:
        """Hands over an item, see `ItemQueue.put`."""
        return self._queue.put(item, size_bytes)

    def close(self) -> None:
        """Publishes the prompts that have ended, and ends the threads. Delays Ctrl-C.

        Raises:
            SpecctlError: the error of a background thread.
        """
        with finishing():
            self._queue.close()
            self._thread.join()
        self._queue.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ----------------------------------------------------------------- recording thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._writer = self._open_writer()
                self._record()
        except BaseException as error:
            self._failed(error)
        finally:
            self._pool.shutdown()

    def _failed(self, error: BaseException) -> None:
        """Hands an error to the producing thread."""
        self._queue.close(error)

    def _record(self) -> None:
        more = True
        while more:
            items, more = self._queue.take()
            self.source.take(items)
            items.clear()  # the last reference to their memory
            self._queue.release()
            if self._write is not None and self._write.done():
                self._wait()
            is_due = time.monotonic() - self._written_at >= self.config.flush_s
            if self.source.held_bytes - self._left_bytes >= self.config.flush_bytes:
                is_due = True
            if self._write is None and is_due:
                self._begin_write()
            self._keep_bounds()
        self._begin_write()
        self._wait()
        self.discarded = tuple(sorted(self.source.unfinished()))

    def _begin_write(self) -> None:
        """Starts to write the prompts that have ended, after waiting for earlier segments."""
        if not self.source.has_ended:
            return
        self._wait()
        found = self.source.publish()
        self._writing_bytes = sum(one.size_bytes for one in found)
        self._left_bytes, self._written_at = self.source.held_bytes, time.monotonic()
        self._write = self._pool.submit(self._publish, found)

    def _publish(self, found: list[Publication]) -> None:
        assert self._writer is not None
        for one in found:
            with torch.inference_mode():
                tables = one.tables()
            policy = {} if one.policy is None else {"policy": one.policy.model_dump(mode="json")}
            segment = self._writer.commit(one.prompt_ids, tables, **policy)
            self.num_bytes += segment.size_bytes
            if self._on_commit is not None:
                self._on_commit(segment)

    def _wait(self) -> None:
        """Waits for the write in progress; raises its error."""
        write, self._write = self._write, None
        if write is not None:
            write.result()
        self._writing_bytes = 0

    def _keep_bounds(self) -> None:
        """Brings the held rows below their bound: by writing, else by an error."""
        while self.source.held_bytes + self._writing_bytes > self.config.held_bytes:
            if self._writing_bytes:
                self._wait()
            elif self.source.has_ended:
                self._begin_write()
            else:
                raise OutputError(
                    f"rows of unfinished prompts take {self.source.held_bytes} bytes, more than "
                    f"{self.config.held_bytes}",
                    hint="decode fewer or shorter prompts together",
                )
