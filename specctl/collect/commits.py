"""Commit records: the only list of what belongs to a trace set.

A record is the acknowledgement of its prompts. Each writer process has its own log of them,
chained by digest, so writers never contend and a lost record shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from specctl.collect.header import Digest, TraceRecord, check_schema_id, parse_record
from specctl.durable import file_sha256
from specctl.errors import TraceCorruptError

DATA, COMMITS, TEMPORARY = "data", "commits", "tmp"
Count = Annotated[int, Field(ge=0)]


class Segment(BaseModel):
    """One Parquet file of a commit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    table: Annotated[str, Field(pattern=r"^(rounds|nodes)$")]
    sha256: Digest
    size_bytes: Count
    num_rows: Count
    schema_id: Digest

    def path(self, root: Path) -> Path:
        """Where the bytes are; derived, so that a record cannot point out of the folder."""
        return root / DATA / f"{self.table}-{self.sha256.removeprefix('sha256:')}.parquet"


class Commit(TraceRecord):
    """One acknowledgement; see the format page for each field."""

    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    seq: Count
    prev_commit: Digest | None
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    created: str
    files: list[Segment]
    prompt_ids: list[str]

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the record's bytes, what the next record points back to."""
        return "sha256:" + hashlib.sha256(self.to_bytes()).hexdigest()

    def path(self, root: Path) -> Path:
        return root / COMMITS / self.writer / f"{self.seq:08d}.json"


@dataclass(frozen=True)
class CommitLog:
    """Everything that the writers of one folder acknowledged."""

    root: Path
    commits: tuple[Commit, ...]

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        return tuple(prompt for commit in self.commits for prompt in commit.prompt_ids)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for commit in self.commits for segment in commit.files)


def read_commits(root: Path) -> CommitLog:
    """Folds the logs of all writers, checking chains and that no prompt was committed twice.

    Raises:
        TraceCorruptError: a record is damaged, missing or out of its chain, or a prompt is
            acknowledged twice.
        TraceSchemaError: a record of another version.
    """
    folders = sorted((root / COMMITS).glob("*")) if (root / COMMITS).is_dir() else []
    log = CommitLog(root, tuple(commit for folder in folders for commit in _read_chain(folder)))
    _check_unique(root, log.prompt_ids)
    return log


def _read_chain(folder: Path) -> Iterable[Commit]:
    previous: str | None = None
    for seq, path in enumerate(sorted(folder.glob("*.json"))):
        content = path.read_bytes()
        commit = parse_record(path, content, Commit)
        place = (folder.name, seq, f"{seq:08d}.json", previous)
        found = (commit.writer, commit.seq, path.name, commit.prev_commit)
        if place != found or commit.to_bytes() != content:
            raise TraceCorruptError(
                str(path),
                expected=f"record {seq} of the writer, after {previous or 'none'}",
                found=f"record {commit.seq} after {commit.prev_commit or 'none'}, or altered bytes",
                fix="restore the missing or altered commit record",
            )
        previous = commit.digest
        yield commit


def _check_unique(root: Path, prompt_ids: Sequence[str]) -> None:
    seen: set[str] = set()
    for prompt in prompt_ids:
        if prompt in seen:
            raise TraceCorruptError(
                f"{root / COMMITS}",
                expected="each prompt in one commit",
                found=f"prompt {prompt!r} in two",
                fix="remove the later writer's folder under commits/",
            )
        seen.add(prompt)


def check_segment(root: Path, segment: Segment, *, verify: bool) -> None:
    """Refuses a file that is not what its record says.

    Args:
        verify: read and digest the bytes too, not only their number.

    Raises:
        TraceCorruptError: missing, truncated or altered.
        TraceSchemaError: other columns.
    """
    path = segment.path(root)
    check_schema_id(path, segment.table, segment.schema_id)
    if not path.is_file():
        raise _damaged(path, f"{segment.size_bytes} bytes", "no file")
    if path.stat().st_size != segment.size_bytes:
        raise _damaged(path, f"{segment.size_bytes} bytes", f"{path.stat().st_size} bytes")
    digest = f"sha256:{file_sha256(path)}" if verify else segment.sha256
    if digest != segment.sha256:
        raise _damaged(path, segment.sha256[:19] + "…", digest[:19] + "…")


def _damaged(path: Path, expected: str, found: str) -> TraceCorruptError:
    fix = "restore the file, or collect into a new folder"
    return TraceCorruptError(str(path), expected=expected, found=found, fix=fix)
