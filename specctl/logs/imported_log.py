"""An imported log: at every position of another tool's texts, how far one chain was accepted.

A folder of two files, whole or not there: `import.json`, canonical JSON, and `positions.parquet`
(docs/import.md). What it does not hold (trees, probabilities) no policy can be replayed from.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from specctl.artifacts.files import write_folder
from specctl.artifacts.manifest import digest_of
from specctl.durable import beside, sync_folder
from specctl.errors import (
    OutputError,
    TraceCorruptError,
    TraceError,
    TraceSchemaError,
    UsageError,
)
from specctl.logs.acceptance_lists import AcceptanceTable
from specctl.logs.import_lines import readable
from specctl.logs.positions import Bools, Ints, Positions
from specctl.records import Record, canonical_json, describe_violation

T = TypeVar("T")
IMPORT_VERSION = 1
HEADER_NAME, POSITIONS_NAME = "import.json", "positions.parquet"
PREFIX = "num_accepted_"
"""Of the column of each drafter."""
COLUMNS = {
    "request_id": "dictionary",
    "category": "dictionary",
    "position": "int32",
    "context_tokens": "int32",
    "remaining": "int32",
}
"""Columns that every import has, before one int32 `num_accepted_<drafter>` a drafter."""
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class ImportedDrafter(Record):
    """One drafter's lists.

    Attributes:
        offered_depth: draft tokens that each round of the log offered.
        offered_depth_inferred: taken as the most that was accepted, since nobody stated it.
        num_censored: positions where all of them were accepted before the text ended: more might
            have been.
        num_entries, misaligned: as in `acceptance_lists.DrafterLists`.
    """

    offered_depth: Count
    offered_depth_inferred: bool
    max_accepted: Count
    num_censored: Count
    num_entries: Count
    misaligned: dict[str, Count]


class ImportHeader(Record):
    """Identity of an import; see the format page for each field."""

    import_version: int = IMPORT_VERSION
    schema_id: Digest
    source_format: str
    source_name: str
    source_digest: Digest
    source_size_bytes: Count
    entry_predicts: Annotated[str, Field(pattern="^(same|next)$")]
    max_misaligned: Annotated[float, Field(ge=0, le=1)]
    drafters: dict[str, ImportedDrafter]
    num_requests: Count
    num_positions: Count
    num_without_rounds: Count
    num_cut_tokens: Count
    positions_digest: Digest
    positions_size_bytes: Count
    specctl_version: str

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal headers give equal bytes."""
        return canonical_json(self.model_dump(mode="json")).encode()


@dataclass(frozen=True)
class AcceptedLengths:
    """How far the chain of one drafter was accepted, at R positions.

    Attributes:
        accepted: `[R]` int32, draft tokens (bonus excluded), at most those that remain.
        offered_depth: draft tokens that each round of the log offered: the longest known chain.
    """

    positions: Positions
    accepted: Ints
    offered_depth: int

    @property
    def is_censored(self) -> Bools:
        """`[R]`: all offered tokens were accepted, and more might have been."""
        return (self.accepted >= self.offered_depth) & (self.accepted < self.positions.remaining)


@dataclass(frozen=True)
class ImportedLog:
    """Accepted lengths of one or more drafters on the same texts; a request is its own prompt."""

    header: ImportHeader
    positions: Positions
    num_accepted: dict[str, Ints]

    @classmethod
    def open(cls, path: str | Path) -> ImportedLog:
        """Reads a folder that `specctl import` wrote; every byte is checked.

        Raises:
            TraceError: not such a folder, of another version, or damaged.
        """
        header = _read_header(Path(path))
        return _read_positions(Path(path) / POSITIONS_NAME, header)

    @property
    def digest(self) -> str:
        """Identity, `sha256:<hex>`; the header lists the digest of the positions."""
        return digest_of(self.header.to_bytes())

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(self.header.drafters)

    def lengths(self, drafter: str) -> AcceptedLengths:
        """Of one drafter.

        Raises:
            UsageError: it was not imported.
        """
        if drafter not in self.num_accepted:
            raise UsageError(
                "imported drafter",
                expected=" or ".join(self.drafters),
                found=repr(drafter),
                fix="name one of them",
            )
        depth = self.header.drafters[drafter].offered_depth
        return AcceptedLengths(self.positions, self.num_accepted[drafter], depth)


# ----------------------------------------------------------------- writing


def save_import(
    folder: str | Path,
    table: AcceptanceTable,
    source: Path,
    *,
    source_format: str,
    entry_predicts: str,
    max_misaligned: float,
    offered_depths: Mapping[str, int],
) -> ImportedLog:
    """Writes an import folder atomically; what is written has been opened once.

    Args:
        folder: a new place or an empty folder.
        source: the file that `table` was read from.
        offered_depths: draft tokens that the logged rounds offered, by drafter; those that are
            missing are inferred as the most that was accepted, and marked so.

    Raises:
        UsageError: a depth that is less than what was accepted, or of no drafter.
        OutputError: a place that cannot be written, or that holds something.
    """
    for name, depth in offered_depths.items():
        lists = table.lists.get(name)
        if lists is None or depth < lists.max_accepted:
            most = "no such drafter" if lists is None else f"{lists.max_accepted} accepted"
            raise UsageError(
                "--offered-depth",
                expected=f"a drafter of {', '.join(table.lists)} and at least what it had accepted",
                found=f"{name}={depth}, {most}",
                fix="state the draft length that the log was written with, or leave it out",
            )
    data = _parquet(table)
    with readable(source), source.open("rb") as stream:
        source_digest = "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
        source_size_bytes = stream.tell()
    header = ImportHeader(
        schema_id=_schema_id(tuple(table.lists)),
        source_format=source_format,
        source_name=source.name,
        source_digest=source_digest,
        source_size_bytes=source_size_bytes,
        entry_predicts=entry_predicts,
        max_misaligned=float(max_misaligned),
        drafters={name: _drafter(name, table, offered_depths) for name in table.lists},
        num_requests=table.positions.num_requests,
        num_positions=table.positions.num_rows,
        num_without_rounds=table.num_without_rounds,
        num_cut_tokens=table.num_cut_tokens,
        positions_digest=digest_of(data),
        positions_size_bytes=len(data),
        specctl_version=version("specctl"),
    )
    contents = {POSITIONS_NAME: data, HEADER_NAME: header.to_bytes()}
    return publish_new(Path(folder).absolute(), contents, ImportedLog.open)


def _drafter(name: str, table: AcceptanceTable, depths: Mapping[str, int]) -> ImportedDrafter:
    lists = table.lists[name]
    depth = depths.get(name, lists.max_accepted)
    lengths = AcceptedLengths(table.positions, table.num_accepted[name], depth)
    return ImportedDrafter(
        offered_depth=depth,
        offered_depth_inferred=name not in depths,
        max_accepted=lists.max_accepted,
        num_censored=int(lengths.is_censored.sum()),
        num_entries=lists.num_entries,
        misaligned=dict(lists.misaligned),
    )


def _parquet(table: AcceptanceTable) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    positions = table.positions
    request = positions.request.astype(np.int32)
    named = {
        "request_id": (request, positions.prompt_ids),
        "category": (positions.category[request], positions.categories),
    }
    arrays = {
        **{
            column: pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string()))
            for column, (codes, names) in named.items()
        },
        "position": _places(positions),
        "context_tokens": positions.context_tokens,
        "remaining": positions.remaining,
        **{PREFIX + name: values for name, values in table.num_accepted.items()},
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(arrays), sink, compression="zstd", use_dictionary=list(named))
    return sink.getvalue()


def _places(positions: Positions) -> Ints:
    """`[R]` output tokens emitted before each position: 1, 2, ... in every request."""
    first = np.repeat(positions.start[:-1], np.diff(positions.start))
    return (np.arange(positions.num_rows) - first + 1).astype(np.int32)


def _schema_id(drafters: tuple[str, ...]) -> str:
    """`sha256:<hex>` over version, names and types of the columns."""
    columns = {**COLUMNS, **{PREFIX + name: "int32" for name in drafters}}
    return digest_of(canonical_json([IMPORT_VERSION, [*columns.items()]]).encode())


def refuse_used(folder: Path) -> None:
    """Raises `OutputError` unless the place is new or an empty folder."""
    try:
        used = os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if used:
        raise OutputError(
            f"import folder {folder}",
            expected="a new place or an empty folder",
            found="something else",
            fix="choose another output folder; nothing was touched",
        )


def publish_new(folder: Path, contents: Mapping[str, bytes], verify: Callable[[Path], T]) -> T:
    """Writes a folder beside its place, verifies it there, then renames it into place.

    Args:
        verify: called on the written folder; what it raises stops the publication.

    Raises:
        OutputError: a place that cannot be written, or that is in use.
    """
    refuse_used(folder)
    staged = beside(folder)
    try:
        write_folder(staged, contents)
        verified = verify(staged)
        staged.rename(folder)  # onto an empty folder, rename(2) replaces it
        sync_folder(folder.parent)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(staged)
    return verified


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"import folder {folder}",
        expected="a place that can be written",
        found=error.strerror or type(error).__name__,
        fix="choose another output folder",
    )


# ----------------------------------------------------------------- reading


def _read_header(root: Path) -> ImportHeader:
    """Reads `import.json` strictly; the version is judged before the fields, which it governs."""
    path = root / HEADER_NAME
    if not path.is_file():
        raise TraceError(
            f"import folder {root}",
            expected=f"a folder with {HEADER_NAME}",
            found="another folder" if root.is_dir() else "no such folder",
            fix="name a folder that `specctl import` wrote from per-position acceptance",
        )
    content, written = path.read_bytes(), "the JSON that specctl wrote"
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, written, f"{len(content)} bytes of something else") from error
    version = value.get("import_version") if isinstance(value, dict) else None
    if version != IMPORT_VERSION:
        raise _other_schema(path, f"import_version {IMPORT_VERSION}", repr(version)[:40])
    try:
        header = ImportHeader.model_validate(value)
    except ValidationError as error:
        found = describe_violation(error)
        raise _other_schema(path, "the fields of docs/import.md", found) from error
    if header.to_bytes() != content:
        raise _damaged(path, written, "other bytes")
    wanted = _schema_id(tuple(header.drafters))
    if header.schema_id != wanted:
        raise _other_schema(path, f"schema {wanted[:19]}…", f"{header.schema_id[:19]}…")
    return header


def _read_positions(path: Path, header: ImportHeader) -> ImportedLog:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise _damaged(path, f"{header.positions_size_bytes} bytes", "no file")
    data = path.read_bytes()
    if digest_of(data) != header.positions_digest:
        expected = f"{header.positions_size_bytes} bytes, {header.positions_digest[:19]}…"
        raise _damaged(path, expected, f"{len(data)} bytes, {digest_of(data)[:19]}…")
    try:
        # Not pq.read_table, nor threads: pyarrow's pool, beside torch, aborts a process that ends
        # soon after ("terminate called without an active exception", pyarrow 26, torch 2.13).
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        table = table.unify_dictionaries().combine_chunks()
    except pa.ArrowException as error:
        raise _damaged(path, "Parquet", "something else") from error
    if table.column_names != [*COLUMNS, *(PREFIX + name for name in header.drafters)]:
        raise _damaged(path, "the columns of its header", f"{table.column_names[:8]}")
    column = {name: table[name].combine_chunks() for name in table.column_names}
    starts = np.flatnonzero(column["position"].to_numpy() == 1)
    start = np.concatenate([starts, [table.num_rows]]).astype(np.int64)
    positions = Positions(
        start=start,
        prompt=column["request_id"].indices.to_numpy()[starts],
        prompt_ids=tuple(column["request_id"].dictionary.to_pylist()),
        category=column["category"].indices.to_numpy()[starts],
        categories=tuple(column["category"].dictionary.to_pylist()),
        remaining=column["remaining"].to_numpy(),
        context_tokens=column["context_tokens"].to_numpy(),
    )
    accepted = {name: column[PREFIX + name].to_numpy() for name in header.drafters}
    _check_positions(path, column, positions, accepted)
    return ImportedLog(header, positions, accepted)


def _check_positions(
    path: Path, column: Mapping[str, Any], positions: Positions, accepted: Mapping[str, Ints]
) -> None:
    """A header with fitting digests may still have been written by hand."""
    size, remaining = np.diff(positions.start), positions.remaining
    place = _places(positions) if len(size) else np.zeros(0, np.int32)
    request = column["request_id"].indices.to_numpy()
    rules = {
        "positions 1, 2, ... in every request": np.array_equal(
            column["position"].to_numpy(), place
        ),
        "each request once": np.array_equal(request, positions.request),
        "as many tokens remaining as positions": np.array_equal(
            remaining, np.repeat(size, size) - place + 1
        ),
        "accepted tokens within what remains": all(
            bool(((values >= 0) & (values <= remaining)).all()) for values in accepted.values()
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise _damaged(path, rule, "otherwise")


def _damaged(path: Path, expected: str, found: str) -> TraceCorruptError:
    fix = "import the source file again"
    return TraceCorruptError(str(path), expected=expected, found=found, fix=fix)


def _other_schema(path: Path, expected: str, found: str) -> TraceSchemaError:
    fix = "import the source file again"
    return TraceSchemaError(str(path), expected=expected, found=found, fix=fix)
