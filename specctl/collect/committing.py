"""Commits in a thread of their own: a disk that takes its time must not hold up logits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from specctl.collect.commits import Commit
from specctl.collect.frames import Frame, join
from specctl.collect.rows import to_tables
from specctl.collect.store import TraceWriter


class Committer:
    """Writes finished prompts, one commit at a time.

    Args:
        on_commit: called in the writing thread, behind each commit.

    Attributes:
        size_bytes: of the rows that are being written.
    """

    def __init__(self, writer: TraceWriter, on_commit: Callable[[Commit], None] | None) -> None:
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
