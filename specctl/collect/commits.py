"""Commit records: the only list of what belongs to a trace set.

A record is the acknowledgement of its prompts. Each writer has its own log of them, chained by
digest, so writers never contend and a lost record shows. The slots of a log are also its fence:
see `specctl.collect.writer_log`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specctl.collect.header import Digest, TraceRecord, check_schema_id
from specctl.collect.places import COMMITS, DATA, Place
from specctl.durable import file_sha256
from specctl.errors import TraceCorruptError
from specctl.policy.parse import canonical_json

Count = Annotated[int, Field(ge=0)]
MAX_SEGMENT_BYTES = 1 << 30
"""Of one file, ten times what a compaction makes: a reader takes a record's word for no more."""
MAX_SEGMENT_ROWS = 1 << 31
ADDED = ("epoch", "opens", "supersedes")
"""Fields that records of the first writers lack; a record without them has none of them."""


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

    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    seq: Count
    prev_commit: Digest | None
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    created: str
    files: list[Segment]
    prompt_ids: list[str]
    epoch: Annotated[int, Field(ge=1)] | None = None
    opens: Annotated[str, Field(pattern=r"^[ -~]{1,100}$")] | None = None
    supersedes: list[Digest] | None = None

    @model_validator(mode="after")
    def _check_opening(self) -> Self:
        if self.opens is not None and (self.files or self.prompt_ids or self.supersedes):
            raise ValueError("a record that opens an epoch acknowledges nothing")
        return self

    def to_bytes(self) -> bytes:
        """Canonical JSON without the added fields that are not set."""
        value: dict[str, Any] = self.model_dump(mode="json")
        for name in ADDED:
            if value[name] is None:
                del value[name]
        return canonical_json(value).encode()

    @cached_property
    def digest(self) -> str:
        """`sha256:<hex>` of the record's bytes, what the next record points back to."""
        return "sha256:" + hashlib.sha256(self.to_bytes()).hexdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, whose digest is its own."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("digest", None)
        return copied

    @property
    def key(self) -> str:
        return record_key(self.writer, self.seq)

    @property
    def num_rows(self) -> int:
        """Of both tables."""
        return sum(segment.num_rows for segment in self.files)

    def path(self, root: Path) -> Path:
        """The file in a set that is a folder."""
        return root / self.key


def record_key(writer: str, seq: int) -> str:
    """The slot of a record in its writer's log."""
    return f"{COMMITS}/{writer}/{seq:08d}.json"


def check_segment(place: Place, segment: Segment, *, verify: bool) -> None:
    """Refuses a file that is not what its record says; one of a bucket is fetched for that.

    Args:
        verify: read and digest the bytes too, not only their number.

    Raises:
        TraceCorruptError: missing, truncated or altered.
        TraceSchemaError: other columns.
        StoreError: the bucket cannot be reached.
    """
    check_schema_id(place.at(segment.key), segment.table, segment.schema_id)
    if place.root is None:
        if verify:
            place.segment_path(segment)
        return
    path = segment.path(place.root)
    if path.is_symlink() or path.parent.is_symlink():  # what it leads to is not the set's
        raise damaged(str(path), "a file of the set's own", "a link")
    check_file(path, segment, verify=verify)


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
