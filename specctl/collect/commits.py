"""Commit records: the only list of what belongs to a trace set.

A record is the acknowledgement of its prompts. Each writer has its own log of them, chained by
digest, so writers never contend and a record that is lost from the middle shows; that the last
ones are lost shows only in a snapshot that names them. The slots of a log are also its fence: see
`specctl.collect.writer_log`.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specctl.collect.places import COMMITS, DATA
from specctl.collect.records import Digest, Moment, TraceRecord
from specctl.durable import file_sha256
from specctl.errors import TraceCorruptError

TextDigest = Annotated[str, Field(pattern=r"^(sha256|blake2b):[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
MAX_SEGMENT_BYTES = 1 << 30
"""Of one file, ten times what a compaction makes: a reader takes a record's word for no more."""
MAX_SEGMENT_ROWS = 1 << 31


def writer_id(name: str) -> str:
    """The 32 hex digits under which a writer of that name keeps its log."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


COMPACTOR = "compactor"
"""One name for all: a second compaction takes it over, and the first one stops at its next commit,
so no two of them supersede the same commit."""


class Segment(BaseModel):
    """One Parquet file of a commit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    table: Annotated[str, Field(pattern=r"^(rounds|nodes)$")]
    sha256: Digest
    size_bytes: Annotated[int, Field(ge=0, le=MAX_SEGMENT_BYTES)]
    num_rows: Annotated[int, Field(ge=0, le=MAX_SEGMENT_ROWS)]
    schema_id: Digest

    @property
    def key(self) -> str:
        """Where the bytes are; derived, so that a record cannot point out of the set."""
        return f"{DATA}/{self.table}-{self.sha256.removeprefix('sha256:')}.parquet"

    def path(self, root: Path) -> Path:
        """The file in a set that is a folder."""
        return root / self.key


class Commit(TraceRecord):
    """One acknowledgement, or the beginning of an epoch; see the format page for each field."""

    ADDED: ClassVar[tuple[str, ...]] = (
        *TraceRecord.ADDED,
        "epoch",
        "header_digest",
        "opens",
        "supersedes",
        "text_digests",
    )

    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    seq: Count
    prev_commit: Digest | None
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    created: Moment
    files: list[Segment]
    prompt_ids: list[str]
    epoch: Annotated[int, Field(ge=1)] | None = None
    header_digest: Digest | None = None
    opens: Annotated[str, Field(pattern=r"^[ -~]{1,100}$")] | None = None
    supersedes: list[Digest] | None = None
    text_digests: list[TextDigest | None] | None = None

    @model_validator(mode="after")
    def _check_opening(self) -> Self:
        if self.opens is not None and (self.files or self.prompt_ids or self.supersedes):
            raise ValueError("a record that opens an epoch acknowledges nothing")
        return self

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        if any(one >= other for one, other in pairwise(self.prompt_ids)):
            raise ValueError("prompt_ids: sorted, each once")
        if self.text_digests is not None and len(self.text_digests) != len(self.prompt_ids):
            raise ValueError("text_digests: one for each of prompt_ids")
        if len({segment.table for segment in self.files}) < len(self.files):
            raise ValueError("files: one of each table")
        return self

    @model_validator(mode="after")
    def _check_superseding(self) -> Self:
        if self.supersedes is not None and self.writer != writer_id(COMPACTOR):
            raise ValueError(f"supersedes: only the writer {COMPACTOR!r} takes commits' places")
        return self

    @property
    def key(self) -> str:
        return record_key(self.writer, self.seq)

    @property
    def num_rows(self) -> int:
        """Of both tables."""
        return sum(segment.num_rows for segment in self.files)

    def rows_of(self, table: str) -> int:
        """Of one table."""
        return sum(segment.num_rows for segment in self.files if segment.table == table)

    def path(self, root: Path) -> Path:
        """The file in a set that is a folder."""
        return root / self.key


def record_key(writer: str, seq: int) -> str:
    """The slot of a record in its writer's log."""
    return f"{COMMITS}/{writer}/{seq:08d}.json"


def check_file(path: Path, segment: Segment, *, verify: bool = True) -> None:
    """Refuses a local file that is not the segment.

    Raises:
        TraceCorruptError: missing, truncated or altered.
    """
    if not path.is_file():
        raise damaged(str(path), f"{segment.size_bytes} bytes", "no file")
    if path.stat().st_size != segment.size_bytes:
        raise damaged(str(path), f"{segment.size_bytes} bytes", f"{path.stat().st_size} bytes")
    digest = f"sha256:{file_sha256(path)}" if verify else segment.sha256
    if digest != segment.sha256:
        raise damaged(str(path), segment.sha256[:19] + "…", digest[:19] + "…")


def damaged(what: str, expected: str, found: str) -> TraceCorruptError:
    """The error of a segment that is not what was committed."""
    fix = "restore the file, or go on without it (`specctl traces verify --quarantine`)"
    return TraceCorruptError(what, expected=expected, found=found, fix=fix)
