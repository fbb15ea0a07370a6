"""An imported log: at every position of another tool's texts, how far one chain was accepted.

A folder of two files, whole or not there: `import.json`, canonical JSON, and `positions.parquet`
(docs/import.md). What it does not hold (trees, probabilities) no policy can be replayed from.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

import numpy as np
from pydantic import Field

from specctl.artifacts.files import write_folder
from specctl.artifacts.manifest import digest_of
from specctl.durable import beside, file_sha256, output_errors, sync_folder
from specctl.errors import OutputError, TraceCorruptError, TraceError, TraceSchemaError, UsageError
from specctl.logs.acceptance_lists import PREFIX, AcceptanceTable
from specctl.logs.positions import Bools, Ints, Positions
from specctl.logs.sources import readable
from specctl.logs.trace_files import Count, Digest, Stored, parse_record
from specctl.records import Record, canonical_json

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

T = TypeVar("T")
IMPORT_VERSION = 1
HEADER_NAME, POSITIONS_NAME = "import.json", "positions.parquet"
COLUMNS = {
    "request_id": "dictionary",
    "category": "dictionary",
    "position": "int32",
    "context_tokens": "int32",
    "remaining": "int32",
}
"""Columns that every import has, before one int32 `num_accepted_<drafter>` a drafter."""
_AGAIN, _ELSEWHERE = "import the source file again", "choose another output folder"


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


class ImportHeader(Stored):
    """Identity of an import; see the format page for each field."""

    VERSION: ClassVar = ("import_version", IMPORT_VERSION)
    PAGE: ClassVar = "docs/import.md"
    NEWER: ClassVar = _AGAIN
    RESTORE: ClassVar = _AGAIN

    import_version: int = IMPORT_VERSION
    schema_id: Digest
    source_format: str
    source_name: str
    source_digest: Digest
    source_size_bytes: Count
    entry_predicts: Annotated[str, Field(pattern="^(same|next)$")]
    max_misaligned: Annotated[float, Field(ge=0, le=1)]
    drafters: Annotated[dict[str, ImportedDrafter], Field(min_length=1)]
    num_requests: Count
    num_positions: Count
    num_without_rounds: Count
    num_cut_tokens: Count
    positions_digest: Digest
    positions_size_bytes: Count
    specctl_version: str


@dataclass(frozen=True)
class AcceptedLengths:
    """Accepted lengths of one drafter's chains, at R positions.

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
        rows = _read_rows(Path(path) / POSITIONS_NAME, header)
        starts = np.flatnonzero(rows["position"] == 1)
        requests = rows.select("request_id", "category")[starts]
        categories, category = np.unique(requests["category"].to_list(), return_inverse=True)
        positions = Positions(
            start=np.append(starts, len(rows)).astype(np.int64),
            prompt=np.arange(len(starts), dtype=np.int32),
            prompt_ids=tuple(requests["request_id"]),
            category=category.astype(np.int32),
            categories=tuple(categories.tolist()),
            remaining=rows["remaining"].to_numpy(),
            context_tokens=rows["context_tokens"].to_numpy(),
        )
        accepted = {name: rows[PREFIX + name].to_numpy() for name in header.drafters}
        return cls(header, positions, accepted)

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
    import pyarrow.parquet as pq

    from specctl.version import __version__

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
    rows, drafters, sink = table.positions, dict[str, ImportedDrafter](), io.BytesIO()
    for name, lists in table.lists.items():
        depth, accepted = offered_depths.get(name, lists.max_accepted), rows[PREFIX + name]
        drafters[name] = ImportedDrafter(
            offered_depth=depth,
            offered_depth_inferred=name not in offered_depths,
            max_accepted=lists.max_accepted,
            num_censored=int(((accepted >= depth) & (accepted < rows["remaining"])).sum()),
            num_entries=lists.num_entries,
            misaligned=dict(lists.misaligned),
        )
    arrow = rows.to_arrow().cast(_schema(table.lists))
    pq.write_table(arrow, sink, compression="zstd", use_dictionary=["request_id", "category"])
    data = sink.getvalue()
    with readable(source):
        digest, size_bytes = f"sha256:{file_sha256(source)}", source.stat().st_size
    header = ImportHeader(
        schema_id=_schema_id(table.lists),
        source_format=source_format,
        source_name=source.name,
        source_digest=digest,
        source_size_bytes=size_bytes,
        entry_predicts=entry_predicts,
        max_misaligned=float(max_misaligned),
        drafters=drafters,
        num_requests=rows["request_id"].n_unique(),
        num_positions=len(rows),
        num_without_rounds=table.num_without_rounds,
        num_cut_tokens=table.num_cut_tokens,
        positions_digest=digest_of(data),
        positions_size_bytes=len(data),
        specctl_version=__version__,
    )
    contents = {POSITIONS_NAME: data, HEADER_NAME: header.to_bytes()}
    return publish_new(Path(folder).absolute(), contents, ImportedLog.open)


def _columns(drafters: Iterable[str]) -> dict[str, str]:
    return COLUMNS | {PREFIX + name: "int32" for name in drafters}


def _schema(drafters: Iterable[str]) -> pa.Schema:
    import pyarrow as pa

    kinds = {"dictionary": pa.dictionary(pa.int32(), pa.string()), "int32": pa.int32()}
    return pa.schema([(name, kinds[kind]) for name, kind in _columns(drafters).items()])


def _schema_id(drafters: Iterable[str]) -> str:
    """`sha256:<hex>` over version, names and types of the columns."""
    columns = [*_columns(drafters).items()]
    return digest_of(canonical_json([IMPORT_VERSION, columns]).encode())


def refuse_used(folder: Path) -> None:
    """Raises `OutputError` unless the place is new or an empty folder."""
    with output_errors(folder, "import folder", _ELSEWHERE):
        used = os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir()))
    if used:
        raise OutputError(
            f"import folder {folder}",
            expected="a new place or an empty folder",
            found="something else",
            fix=f"{_ELSEWHERE}; nothing was touched",
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
        with output_errors(folder, "import folder", _ELSEWHERE):
            write_folder(staged, contents)
            verified = verify(staged)
            staged.rename(folder)  # onto an empty folder, rename(2) replaces it
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return verified


# ----------------------------------------------------------------- reading


def _read_header(root: Path) -> ImportHeader:
    path = root / HEADER_NAME
    if not path.is_file():
        raise TraceError(
            f"import folder {root}",
            expected=f"a folder with {HEADER_NAME}",
            found="another folder" if root.is_dir() else "no such folder",
            fix="name a folder that `specctl import` wrote from per-position acceptance",
        )
    header = parse_record(str(path), path.read_bytes(), ImportHeader)
    wanted = _schema_id(header.drafters)
    if header.schema_id != wanted:
        raise TraceSchemaError(
            str(path),
            expected=f"schema {wanted[:19]}…",
            found=f"{header.schema_id[:19]}…",
            fix=_AGAIN,
        )
    return header


def _read_rows(path: Path, header: ImportHeader) -> pl.DataFrame:
    """The rows of the positions; a header with fitting digests may still be written by hand."""
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    def damaged(expected: str, found: str) -> TraceCorruptError:
        return TraceCorruptError(str(path), expected=expected, found=found, fix=_AGAIN)

    if not path.is_file():
        raise damaged(f"{header.positions_size_bytes} bytes", "no file")
    data = path.read_bytes()
    if digest_of(data) != header.positions_digest:
        expected = f"{header.positions_size_bytes} bytes, {header.positions_digest[:19]}…"
        raise damaged(expected, f"{len(data)} bytes, {digest_of(data)[:19]}…")
    try:
        # Not pq.read_table, nor threads: pyarrow's pool, beside torch, aborts a process that ends
        # soon after ("terminate called without an active exception", pyarrow 26, torch 2.13).
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except pa.ArrowException as error:
        raise damaged("Parquet", "something else") from error
    if not table.schema.equals(_schema(header.drafters)):
        raise damaged("the columns of its header", f"{table.column_names[:8]}")
    rows = pl.DataFrame(table)
    request, position, remaining = map(pl.col, ("request_id", "position", "remaining"))
    accepted = pl.col([PREFIX + name for name in header.drafters])
    goes_on = (request == request.shift()).fill_null(value=False)
    ends = ~goes_on.shift(-1, fill_value=False)
    rules = {
        "a value in every row": ~pl.any_horizontal(pl.all().is_null()),
        "positions 1, 2, ... in every request": position
        == pl.when(goes_on).then(position.shift() + 1).otherwise(1),
        "each request once": (position == 1).sum() == request.n_unique(),
        "as many tokens remaining as positions": remaining
        == pl.when(ends).then(1).otherwise(remaining.shift(-1) + 1),
        "accepted tokens within what remains": pl.all_horizontal(accepted.is_between(0, remaining)),
    }
    verdicts = rows.select(holds.all().alias(rule) for rule, holds in rules.items())
    for rule, holds in verdicts.row(0, named=True).items():
        if not holds:
            raise damaged(rule, "otherwise")
    return rows
