"""The durable writer of a trace set: whole prompts in, acknowledged commits out.

    write spool ─► re-read ─► digest ─► put into data/ ─► create the commit record ─► ack

Killed anywhere before the record exists, the set does not contain the prompts; afterwards it does.
In a folder a put is: sync, link, sync the folder. Many writers share a set, each with a log of its
own (`writer_log`); only `data/` and the header are common, and both are named by what they hold.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from specctl.collect.commits import Commit, Segment, writer_id
from specctl.collect.files import check_segment
from specctl.collect.formats import Prompt
from specctl.collect.header import TraceHeader, read_header
from specctl.collect.logs import CommitLog, read_commits
from specctl.collect.places import Place, open_place
from specctl.collect.preparing import check_place, prepare
from specctl.collect.quarantine import read_quarantine
from specctl.collect.rivals import check_count, lock, retire_rivals, unlock
from specctl.collect.segments import write_segment
from specctl.collect.shards import WHOLE, Shard
from specctl.collect.spool import Spool
from specctl.collect.texts import Texts, check_same_texts, committed_texts, texts_of
from specctl.collect.tokens import KEEP, TokenTreatment
from specctl.collect.writer_log import WriterLog
from specctl.durable import make_folder, output_errors
from specctl.errors import InvariantError, OutputError, StoreError
from specctl.stores.creating import elapsed_s
from specctl.stores.local import TEMPORARY

if TYPE_CHECKING:
    import pyarrow as pa

MAX_COMMIT_S = 3600.0
"""From the first byte of a segment to its record; far below the grace of a pruner."""


class TraceWriter:
    """Appends commits to one set; not thread-safe, one process for each name.

    Attributes:
        root: the folder, or where segments are prepared for a bucket.
        committed: prompts acknowledged, by other writers too.
    """

    def __init__(
        self,
        log: WriterLog,
        committed: CommitLog,
        *,
        lock: int = -1,
        tokens: TokenTreatment = KEEP,
    ) -> None:
        self.place, self.committed = log.place, set(committed.prompt_ids)
        self._texts = committed_texts(committed.commits)
        self._log, self._lock, self._tokens = log, lock, tokens
        self._stopped: str | None = None
        self._spool = None if self.place.root is not None else Spool()

    @property
    def root(self) -> Path:
        if self.place.root is not None:
            return self.place.root
        assert self._spool is not None
        return self._spool.folder

    @classmethod
    def open(
        cls,
        path: str | Path,
        header: TraceHeader,
        *,
        resume: bool = False,
        shard: Shard = WHOLE,
        tokens: TokenTreatment = KEEP,
    ) -> TraceWriter:
        """Starts a set, joins one as another shard's writer, or goes on with one.

        Args:
            path: a folder or `s3://bucket/prefix`.
            resume: accept a set that already holds traces of the same run. A place that is empty
                or absent is started either way.
            shard: names the writer. Resuming takes it over from a process that still has it, and
                shuts out writers of another count.

        Raises:
            OutputError: the folder cannot be written, the writer is in use on this machine, the
                place holds something else, or traces and `resume` is off.
            TraceMismatchError: traces of another pair, policy, sampling or configuration.
            TraceError: damaged traces.
            StoreError: a bucket that refuses, or that cannot create exclusively.
        """
        place = open_place(path)
        check_place(place, shard, resume=resume)
        prepare(place, header)
        if not resume:
            check_count(place, shard)
        return cls.named(place, shard.name, shard=shard, tokens=tokens)

    @classmethod
    def named(
        cls,
        place: Place,
        name: str,
        *,
        shard: Shard | None = None,
        tokens: TokenTreatment = KEEP,
        allow_repeats: bool = False,
    ) -> TraceWriter:
        """The writer of a name on a set that is there; see `open` for what it raises.

        Args:
            shard: part of the prompts that it collects; writers of another count are shut out.
            allow_repeats: also where two commits hold one prompt, which a compaction mends.
        """
        descriptor = lock(place, name)
        try:
            header_digest = read_header(place).digest
            writer_log = WriterLog.take(place, name, header_digest)
            chains = {writer_id(name): writer_log.taken}
            if shard is not None:
                chains |= retire_rivals(place, shard, header_digest)
            log = read_commits(place, allow_repeats=allow_repeats, chains=chains)
            _check_files(log)
            return cls(writer_log, log, lock=descriptor, tokens=tokens)
        except BaseException:
            unlock(descriptor)
            raise

    def plan(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those that are not committed yet, in order; their commits will tell of their texts.

        Raises:
            TraceMismatchError: a prompt that was committed with another text.
        """
        texts = texts_of(prompts, self._tokens)
        check_same_texts(self.place, self._texts, texts)
        self.learn(texts)
        return [prompt for prompt in prompts if prompt.prompt_id not in self.committed]

    def learn(self, texts: Texts) -> None:
        """Takes digests of texts that the next commits are to hold."""
        self._texts |= texts

    def pending(self, prompt_ids: Iterable[str]) -> list[str]:
        """Those of the planned prompts that are not committed yet, in order."""
        return [prompt for prompt in prompt_ids if prompt not in self.committed]

    def commit(self, prompt_ids: Iterable[str], tables: Mapping[str, pa.Table]) -> Commit:
        """Writes all rows of some finished prompts; they are durable when this returns.

        Args:
            tables: by name; one without rows leaves no file.

        Raises:
            WriterFencedError: another process took this writer over.
            OutputError: nothing was acknowledged, and this writer takes no more.
            InvariantError: a prompt that is already committed.
        """
        finished = sorted(prompt_ids)
        self._check_new(finished)
        record = self.replace((), finished, tables)
        self.committed.update(finished)
        return record

    def replace(
        self,
        superseded: Sequence[Commit],
        prompt_ids: Sequence[str],
        tables: Mapping[str, pa.Table],
    ) -> Commit:
        """A commit in the place of others, as a compaction makes it; see `commit`."""
        self._check_open()
        self._stopped = "an earlier commit that failed"  # until this one is through
        begun_s = elapsed_s()
        with _writing(self.place):
            files = [self._write(name, rows) for name, rows in sorted(tables.items()) if len(rows)]
            digests = [commit.digest for commit in superseded] or None
            self._check_in_time(begun_s)
            texts = committed_texts(superseded) | self._texts
            told = [texts.get(prompt) for prompt in prompt_ids]
            record = self._log.append(files, prompt_ids, digests, told if any(told) else None)
        self._stopped = None
        return record

    def close(self) -> None:
        """Releases the writer's name. Everything committed is already durable."""
        unlock(self._lock)
        if self._spool is not None:
            self._spool.close()
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

    def _check_open(self) -> None:
        if self._stopped:
            raise OutputError(
                f"trace set {self.place.name}",
                expected="a working writer",
                found=self._stopped,
                fix="start the command again (with --resume, where it has that)",
            )

    def _check_in_time(self, begun_s: float) -> None:
        """A machine that slept between a segment and its record may find the segment pruned."""
        if elapsed_s() - begun_s > MAX_COMMIT_S:
            raise OutputError(
                f"trace set {self.place.name}",
                expected=f"files written within {MAX_COMMIT_S:g} s of their record",
                found=f"{elapsed_s() - begun_s:.0f} s",
                fix="start the command again (with --resume, where it has that)",
            )

    def _check_new(self, prompt_ids: list[str]) -> None:
        if len(set(prompt_ids) - self.committed) < len(prompt_ids):
            raise InvariantError(
                f"trace set {self.place.name}",
                expected="prompts that are not committed yet",
                found=repr([p for p in prompt_ids if p in self.committed][:3] or prompt_ids[:3]),
                fix="decode only `pending` prompts, each of them once",
            )

    def _write(self, table: str, rows: pa.Table) -> Segment:
        folder = self.root / TEMPORARY
        make_folder(folder.absolute())
        temporary = folder / f"{uuid.uuid4().hex}.parquet"
        return write_segment(self.place, temporary, table, self._tokens.applied(table, rows))


def _check_files(log: CommitLog) -> None:
    """Now, not after hours of decoding. A commit in quarantine is known to be damaged, and its
    prompts stay what they are, acknowledged: of a bucket nothing is looked at either."""
    notes = read_quarantine(log.place) if log.place.root is not None else {}
    for commit in log.commits if log.place.root is not None else ():
        for segment in commit.files if commit.digest not in notes else ():
            check_segment(log.place, segment, verify=False)


@contextmanager
def _writing(place: Place) -> Iterator[None]:
    """What a store refuses while a set is written to, said for the one who collects."""
    try:
        with output_errors(Path(place.name), "trace folder"):
            yield
    except StoreError as error:
        raise OutputError(
            f"trace set {error.what}",
            expected=error.expected,
            found=error.found,
            fix="free space, correct permissions or reach the store, then run it again (with "
            "--resume, where the command has it)",
        ) from error
