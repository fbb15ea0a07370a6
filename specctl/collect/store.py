"""The durable writer of a trace set: whole prompts in, acknowledged commits out.

    write tmp ─► re-read ─► fsync ─► link into data/ ─► fsync folder ─► link commit record ─► ack

Killed anywhere before the last link, the set does not contain the prompts; after it, it does.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specctl.collect.commits import (
    COMMITS,
    DATA,
    TEMPORARY,
    Commit,
    Segment,
    check_segment,
    read_commits,
)
from specctl.collect.header import HEADER_NAME, TraceHeader, check_same_run, read_header
from specctl.collect.segments import write_segment
from specctl.durable import (
    lock_folder,
    make_folder,
    output_errors,
    publish,
    sync_folder,
    write_new,
)
from specctl.errors import InvariantError, OutputError


class TraceWriter:
    """Appends commits to one folder; not thread-safe, one process at a time.

    Attributes:
        root: the folder.
        committed: prompts acknowledged, by earlier writers too.
    """

    def __init__(self, root: Path, lock: int, committed: Iterable[str]) -> None:
        self.root, self.committed = root, set(committed)
        self._lock, self._name, self._last = lock, uuid.uuid4().hex, None
        self._stopped: str | None = None

    _last: Commit | None

    @classmethod
    def open(cls, path: str | Path, header: TraceHeader, *, resume: bool = False) -> TraceWriter:
        """Starts a set, or goes on with one.

        Args:
            resume: accept a folder that already holds traces of the same run. A folder that is
                empty or absent is started either way.

        Raises:
            OutputError: the folder cannot be written, is in use, holds something else, or holds
                traces and `resume` is off.
            TraceMismatchError: traces of another pair, policy, sampling or configuration.
            TraceError: damaged traces.
        """
        root = Path(path)
        _check_target(root, resume=resume)
        with output_errors(root, "trace folder"):
            make_folder(root.absolute())
            lock = lock_folder(root)
        try:
            return cls(root, lock, _prepare(root, header))
        except BaseException:
            os.close(lock)
            raise

    def pending(self, prompt_ids: Iterable[str]) -> list[str]:
        """Those of the planned prompts that are not committed yet, in order."""
        return [prompt for prompt in prompt_ids if prompt not in self.committed]

    def commit(self, prompt_ids: Iterable[str], tables: Mapping[str, Any]) -> Commit:
        """Writes all rows of some finished prompts; they are durable when this returns.

        Args:
            tables: `pyarrow.Table` by name; a table without rows leaves no file.

        Raises:
            OutputError: nothing was acknowledged, and this writer takes no more.
            InvariantError: a prompt that is already committed.
        """
        finished = sorted(prompt_ids)
        self._check_open(finished)
        self._stopped = "an earlier commit that failed"  # until this one is through
        with output_errors(self.root, "trace folder"):
            record = self._publish(finished, tables)
        self._stopped = None
        self._last = record
        self.committed.update(finished)
        return record

    def close(self) -> None:
        """Releases the folder. Everything committed is already durable."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock, self._stopped = -1, "a writer that was closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self, prompt_ids: list[str]) -> None:
        if self._stopped:
            raise OutputError(
                f"trace folder {self.root}",
                expected="a working writer",
                found=self._stopped,
                fix="open the folder again with --resume",
            )
        if len(set(prompt_ids) - self.committed) < len(prompt_ids):
            raise InvariantError(
                f"trace folder {self.root}",
                expected="prompts that are not committed yet",
                found=repr([p for p in prompt_ids if p in self.committed][:3] or prompt_ids[:3]),
                fix="decode only `pending` prompts, each of them once",
            )

    def _publish(self, prompt_ids: list[str], tables: Mapping[str, Any]) -> Commit:
        files = [self._write(name, rows) for name, rows in sorted(tables.items()) if rows.num_rows]
        record = self._next_record(prompt_ids, files)
        final, temporary = record.path(self.root), self._temporary("json")
        make_folder(final.parent.absolute())
        write_new(temporary, record.to_bytes())
        publish(temporary, final)
        return record

    def _write(self, table: str, rows: Any) -> Segment:
        return write_segment(self.root, self._temporary("parquet"), table, rows)

    def _next_record(self, prompt_ids: list[str], files: list[Segment]) -> Commit:
        return Commit(
            writer=self._name,
            seq=self._last.seq + 1 if self._last else 0,
            prev_commit=self._last.digest if self._last else None,
            nonce=uuid.uuid4().hex,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            files=files,
            prompt_ids=prompt_ids,
        )

    def _temporary(self, suffix: str) -> Path:
        return self.root / TEMPORARY / f"{uuid.uuid4().hex}.{suffix}"


def _check_target(root: Path, *, resume: bool) -> None:
    """Refuses a place that is not ours to write to, before anything is created there."""
    with output_errors(root, "trace folder"):
        exists, is_folder = root.exists(), root.is_dir()
        names = {entry.name for entry in root.iterdir()} if is_folder else set()
    if exists and not is_folder:
        raise _refused(root, "a folder", "a file", "choose another place")
    if HEADER_NAME in names and not resume:
        fix = "go on with --resume, or choose another folder"
        raise _refused(root, "an empty folder", "traces", fix)
    # A writer killed before its header was published leaves an empty set: `tmp/` alone.
    if HEADER_NAME not in names and names - {TEMPORARY}:
        found = f"{sorted(names)[0]!r} and no {HEADER_NAME}"
        raise _refused(root, "an empty folder or a trace set", found, "choose another folder")


def _refused(root: Path, expected: str, found: str, fix: str) -> OutputError:
    return OutputError(f"trace folder {root}", expected=expected, found=found, fix=fix)


def _prepare(root: Path, header: TraceHeader) -> tuple[str, ...]:
    """Brings a locked folder into shape; returns the prompts that it already holds."""
    if (root / HEADER_NAME).exists():
        check_same_run(root, read_header(root), header)
    with output_errors(root, "trace folder"):
        _clear_temporary(root / TEMPORARY)
        if not (root / HEADER_NAME).exists():
            temporary = root / TEMPORARY / HEADER_NAME
            write_new(temporary, header.to_bytes())
            publish(temporary, root / HEADER_NAME)
        make_folder((root / DATA).absolute())
        make_folder((root / COMMITS).absolute())
    log = read_commits(root)
    for segment in log.segments:
        check_segment(root, segment, verify=False)  # fail now, not after hours of decoding
    return log.prompt_ids


def _clear_temporary(folder: Path) -> None:
    """Removes what killed writers left; we hold the lock, so nobody is writing there."""
    make_folder(folder.absolute())
    for leftover in folder.iterdir():
        leftover.unlink()
    sync_folder(folder)
