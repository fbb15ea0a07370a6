"""The live recorder: an observer of the runtime that writes traces from a background thread.

    decoding thread          background thread
    on_round(record)  ──►    compact: read the logits, drop them
    finish_prompt(id) ──►    every `flush_s`: join, to_tables, commit, `on_commit`

The decoding thread only appends to a queue. Rounds of a prompt stay in memory, about 70 bytes a
drafted node, until it is finished: the commit of a prompt is all or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from threading import Thread
from types import TracebackType
from typing import Self

import torch

from specctl.collect.backlog import Backlog
from specctl.collect.commits import Commit
from specctl.collect.rows import Frame, compact, join, pick, to_tables
from specctl.collect.stack import alike
from specctl.collect.store import TraceWriter
from specctl.runtime.observe import RoundRecord


@dataclass(frozen=True)
class RecorderConfig:
    """When to commit and how much may wait.

    Attributes:
        flush_s: seconds between commits while finished prompts wait: what a kill may cost.
        flush_bytes: commit earlier when this much is held in memory.
        max_rounds, max_bytes: bounds of the queue; decoding blocks at them.
        wake_s, wake_rounds: how long, and for how many rounds, the thread sleeps at most.
    """

    flush_s: float = 2.0
    flush_bytes: int = 16 << 20
    max_rounds: int = 256
    max_bytes: int = 256 << 20
    wake_s: float = 0.25
    wake_rounds: int = 16


@dataclass(frozen=True)
class _Finished:
    prompt_id: str


class TraceRecorder:
    """Records rounds into a `TraceWriter`, whole prompts at a time.

    Use it as a context manager: leaving it, by Ctrl-C too, commits the finished prompts and
    discards the others. An error of the background thread is raised in the decoding thread, at
    the next call and at `close`.

    Attributes:
        discarded: prompts seen but not finished, known after `close`.
    """

    def __init__(
        self,
        writer: TraceWriter,
        config: RecorderConfig | None = None,
        on_commit: Callable[[Commit], None] | None = None,
    ) -> None:
        self.discarded: tuple[str, ...] = ()
        self._writer, self._config = writer, config or RecorderConfig()
        self._on_commit = on_commit
        self._frames: list[Frame] = []
        self._held_bytes = 0
        self._finished: set[str] = set()
        self._committed_at = time.monotonic()
        limits = self._config
        self._backlog = Backlog(limits.max_rounds, limits.max_bytes, limits.wake_rounds)
        self._thread = Thread(target=self._run, name="specctl-recorder", daemon=True)
        self._thread.start()

    def on_round(self, record: RoundRecord) -> None:
        """Enqueues a round; waits only where the queue is full."""
        size = record.target_logits.nbytes
        if record.target_logp_source is not record.target_logits:
            size += record.target_logp_source.nbytes
        self._backlog.put(record, size)

    def finish_prompt(self, prompt_id: str) -> None:
        """All rounds of a prompt were seen: it goes into the next commit."""
        self._backlog.put(_Finished(prompt_id))

    def close(self) -> None:
        """Commits what is finished and ends the thread.

        Raises:
            SpecctlError: what the background thread failed with.
        """
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

    def _consume(self) -> None:
        more = True
        while more:
            items, more = self._backlog.take(self._config.wake_s)
            # A prompt is finished after its last round, so the order between the two is kept.
            self._keep(item for item in items if isinstance(item, RoundRecord))
            self._finished.update(i.prompt_id for i in items if isinstance(i, _Finished))
            if self._is_due():
                self._commit()
        self._commit()
        left = {request.prompt_id for frame in self._frames for request in frame.requests}
        self.discarded = tuple(sorted(left))

    def _keep(self, records: Iterable[RoundRecord]) -> None:
        for together in alike(records):
            frame = compact(together)
            self._frames.append(frame)
            self._held_bytes += frame.size_bytes

    def _is_due(self) -> bool:
        waited_s = time.monotonic() - self._committed_at
        return waited_s >= self._config.flush_s or self._held_bytes >= self._config.flush_bytes

    def _commit(self) -> None:
        """Writes the finished prompts and keeps the rows of the others."""
        if not self._finished:
            return
        done, self._frames = split(self._frames, self._finished)
        commit = self._writer.commit(self._finished, to_tables(join(done)) if done else {})
        self._finished, self._committed_at = set(), time.monotonic()
        self._held_bytes = sum(frame.size_bytes for frame in self._frames)
        if self._on_commit is not None:
            self._on_commit(commit)


def split(frames: list[Frame], finished: Collection[str]) -> tuple[list[Frame], list[Frame]]:
    """Rows of finished prompts, and of the others."""
    done, rest = [], []
    for frame in frames:
        ends = [request.prompt_id in finished for request in frame.requests]
        done.append(pick(frame, [row for row, end in enumerate(ends) if end]))
        rest.append(pick(frame, [row for row, end in enumerate(ends) if not end]))
    return [f for f in done if f.requests], [f for f in rest if f.requests]
