"""The live recorder: an observer of the runtime that writes traces from background threads.

    decoding thread          recording thread                       committing thread
    on_round(record)  ──►    statistics on the round's device ──►
    finish_prompt(id) ──►    to the host, logits dropped            every `flush_s`:
                             rows held until finished        ──►    join, to_tables, commit

The decoding thread marks its place in the device's work and appends to a queue; it never waits
for a device. Rounds of a prompt stay in memory, about 70 bytes a drafted node, until it is
finished: the commit of a prompt is all or nothing. Everything that waits is bounded, and
`when_full` says what a bound does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Thread
from types import TracebackType
from typing import Self

import torch

from specctl.collect.admission import (
    Admission,
    Dropped,
    Finished,
    Losses,
    Queued,
    Waiting,
    WhenFull,
)
from specctl.collect.backlog import Backlog
from specctl.collect.frames import Frame, Heading, heading_of, join, pick, statistics
from specctl.collect.held import Held
from specctl.collect.rows import to_tables
from specctl.collect.stack import alike
from specctl.collect.trace_writer import FLUSH_BYTES, FLUSH_S, TraceWriter, finishing
from specctl.collect.transfer import Landed, Lane, Shipping, lane_for
from specctl.errors import OutputError
from specctl.logs.trace_files import Segment
from specctl.runtime.observe import RoundRecord

Context = tuple[Heading, list[int]]
"""Of rounds on their way to the host: their heading, and the rows to keep."""


@dataclass(frozen=True)
class RecorderConfig:
    """When to commit and how much may wait.

    Attributes:
        flush_s: seconds between commits while finished prompts wait: what a kill may cost.
        flush_bytes: commit earlier when this much is held in memory.
        when_full: what happens at a bound: `block` lets decoding wait, `drop` costs the prompts
            whose rounds find no room.
        max_rounds, max_bytes: bounds of the queue, bytes of logits on the rounds' device.
        copy_bytes: bound of the host memory that copies go to, pinned on CUDA.
        held_bytes: bound of the rows that wait for their prompt's end or for the disk. No waiting
            helps against it where a single prompt outgrows it: an error under `block`.
        wake_s, wake_rounds: how long, and for how many rounds, the thread sleeps at most.
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


class TraceRecorder:
    """Records rounds into a `TraceWriter`, whole prompts at a time.

    Use it as a context manager: leaving it, by Ctrl-C too, commits the finished prompts and
    discards the others. An error of a background thread is raised in the decoding thread, at
    the next call and at `close`.

    Args:
        lane: to the host; that of the first round's device unless given.

    Attributes:
        discarded: prompts seen but not finished, known after `close`.
        losses: what a full queue cost, complete after `close`.
    """

    def __init__(
        self,
        writer: TraceWriter,
        config: RecorderConfig | None = None,
        on_commit: Callable[[Segment], None] | None = None,
        lane: Lane | None = None,
    ) -> None:
        self.discarded: tuple[str, ...] = ()
        limits = self._config = config or RecorderConfig()
        self._lane = lane
        self._shipping: Shipping[Context] | None = None
        self._held, self._committer = Held(), Committer(writer, on_commit)
        self._committed_at = time.monotonic()
        bounds = limits.max_rounds, limits.max_bytes, limits.wake_rounds
        self._backlog: Backlog[Queued] = Backlog(*bounds)
        self._admission = Admission(self._backlog, limits.when_full)
        self._thread = Thread(target=self._run, name="specctl-recorder", daemon=True)
        self._thread.start()

    @property
    def losses(self) -> Losses:
        return self._admission.losses + self._held.losses

    def on_round(self, record: RoundRecord) -> None:
        """Enqueues a round; waits only where the queue is full and `when_full` says so."""
        if self._lane is None:
            self._lane = lane_for(record.target_logits.device)
        self._admission.offer(record, self._lane)

    def finish_prompt(self, prompt_id: str) -> None:
        """All rounds of a prompt were seen: it goes into the next commit."""
        self._admission.finish(prompt_id)

    def close(self) -> None:
        """Commits what is finished and ends the threads; see `finishing` for a Ctrl-C meanwhile.

        Raises:
            SpecctlError: what a background thread failed with.
        """
        with finishing():
            self._backlog.close()
            self._thread.join()
        self._backlog.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._consume()
        except BaseException as error:  # handed over, and raised in the decoding thread
            self._backlog.fail(error)
        finally:
            self._committer.close()

    def _consume(self) -> None:
        while self._step():
            if self._committer.is_idle() and self._is_due():
                self._commit()
            self._bound()
        self._commit()
        self._committer.wait()
        self.discarded = tuple(sorted(self._held.prompt_ids))

    def _step(self) -> bool:
        """Brings what waits to the host; whether more may come."""
        items, more = self._backlog.take(self._config.wake_s)
        for landed in self._transfer([item for item in items if isinstance(item, Waiting)]):
            heading, kept = landed.context
            self._held.add(pick(heading.frame(landed.tensors), kept))
        self._end_prompts(items)
        items.clear()  # the last that holds on to logits
        self._backlog.release()
        return more

    def _end_prompts(self, items: list[Queued]) -> None:
        """A prompt ends after its last round, so the order between the two is kept."""
        for item in items:
            if isinstance(item, Dropped):
                self._held.drop(item.prompt_ids)
            elif isinstance(item, Finished):
                self._held.finish(item.prompt_id)

    def _transfer(self, waiting: list[Waiting]) -> list[Landed[Context]]:
        """Statistics of rounds, on the host; until then `waiting` keeps what the device reads."""
        if self._shipping is None:
            if self._lane is None:
                return []  # no round was seen yet
            self._shipping = Shipping(self._lane, self._config.copy_bytes)
        landed: list[Landed[Context]] = []
        shipping, order = self._shipping, iter(waiting)
        for records in alike(item.record for item in waiting):
            together = list(islice(order, len(records)))
            with shipping.lane.after([item.mark for item in together]):
                context = heading_of(records), _kept(together)
                landed += shipping.send(statistics(records), context)
        return landed + shipping.land()

    def _is_due(self) -> bool:
        waited_s = time.monotonic() - self._committed_at
        return waited_s >= self._config.flush_s or self._held.size_bytes >= self._config.flush_bytes

    def _commit(self) -> None:
        """Starts to write the finished prompts; keeps the rows of the others."""
        if self._held.finished:
            self._committer.start(*self._held.take_finished())
            self._committed_at = time.monotonic()

    def _bound(self) -> None:
        """Gets the rows below their bound: by the disk, and else as `when_full` says."""
        limit = self._config.held_bytes
        while self._held.size_bytes + self._committer.size_bytes > limit:
            if self._committer.size_bytes:
                self._committer.wait()
            elif self._held.finished:
                self._commit()
            elif self._config.when_full == "drop":
                self._held.give_up()
            else:
                raise OutputError(
                    "trace recorder",
                    expected=f"unfinished prompts of at most {limit} bytes",
                    found=f"{self._held.size_bytes} bytes",
                    fix="decode fewer prompts together, or shorter ones, or drop what is too long",
                )


def _kept(waiting: list[Waiting]) -> list[int]:
    """Rows of these rounds, counted through, whose prompt was not dropped."""
    lives = [r.prompt_id not in w.dropped for w in waiting for r in w.record.requests]
    return [row for row, alive in enumerate(lives) if alive]


class Committer:
    """Writes finished prompts, one commit at a time.

    Args:
        on_commit: called in the writing thread, behind each commit.

    Attributes:
        size_bytes: of the rows that are being written.
    """

    def __init__(self, writer: TraceWriter, on_commit: Callable[[Segment], None] | None) -> None:
        self.size_bytes = 0
        self._writer, self._on_commit = writer, on_commit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specctl-commits")
        self._commit: Future[None] | None = None

    def is_idle(self) -> bool:
        """Whether nothing is being written; raises what the last commit failed with."""
        if self._commit is not None and self._commit.done():
            self.wait()
        return self._commit is None

    def start(self, prompt_ids: set[str], frames: list[Frame]) -> None:
        """Begins a commit, once the one before is through."""
        self.wait()
        self.size_bytes = sum(frame.size_bytes for frame in frames)
        self._commit = self._pool.submit(self._write, prompt_ids, frames)

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            SpecctlError: what the commit failed with.
        """
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.result()
        self.size_bytes = 0

    def close(self) -> None:
        """Ends the thread behind the commit that it is writing."""
        self._pool.shutdown()

    def _write(self, prompt_ids: set[str], frames: list[Frame]) -> None:
        with torch.inference_mode():
            tables = to_tables(join(frames)) if frames else {}
        commit = self._writer.commit(prompt_ids, tables)
        if self._on_commit is not None:
            self._on_commit(commit)
