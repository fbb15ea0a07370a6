"""Imported acceptance as a folder: written once, opened for replay."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import TraceCorruptError, UsageError
from specctl.logs.positions import Bools, Ints, Longs, Positions
from specctl.replay.foreign.folder import publish_new
from specctl.replay.foreign.header import (
    HEADER_NAME,
    POSITIONS_NAME,
    PREFIX,
    ImportedDrafter,
    ImportHeader,
    columns_of,
    digest_of,
    read_header,
    schema_id,
)
from specctl.replay.foreign.lines import readable
from specctl.replay.foreign.table import AcceptanceTable, DrafterReport


@dataclass(frozen=True)
class ImportedTraces:
    """Per-position acceptance of one or more drafters on the same texts.

    Attributes:
        positions: R positions; a request is its own prompt.
        num_accepted: drafter to `[R]` int32, draft tokens accepted there (bonus excluded), at
            most those that remain.
    """

    header: ImportHeader
    positions: Positions
    num_accepted: dict[str, Ints]

    @classmethod
    def open(cls, path: str | Path) -> ImportedTraces:
        """Reads a folder that `specctl import` wrote; every byte is checked.

        Raises:
            TraceError: not such a folder, of another version, or damaged.
        """
        root = Path(path)
        header = read_header(root)
        return _read(root / POSITIONS_NAME, header)

    @property
    def digest(self) -> str:
        """Identity, `sha256:<hex>`."""
        return self.header.digest

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(self.header.drafters)

    def accepted_by(self, drafter: str) -> Ints:
        """`[R]` of one drafter.

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
        return self.num_accepted[drafter]

    def offered_depth(self, drafter: str) -> int:
        """Draft tokens that each of its rounds offered: the longest chain that is known."""
        self.accepted_by(drafter)
        return self.header.drafters[drafter].offered_depth

    def censored(self, drafter: str) -> Bools:
        """`[R]`: all offered draft tokens were accepted before the text ended."""
        accepted = self.accepted_by(drafter)
        return censored(accepted, self.positions.remaining, self.offered_depth(drafter))


def censored(accepted: Ints, remaining: Ints, offered_depth: int) -> Bools:
    """`[R]`: where a longer draft might have been accepted further."""
    return (accepted >= offered_depth) & (accepted < remaining)


def save_traces(
    folder: str | Path,
    table: AcceptanceTable,
    source: Path,
    *,
    source_format: str,
    entry_predicts: str,
    max_misaligned: float,
    offered_depths: Mapping[str, int],
) -> ImportedTraces:
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
    _check_depths(table.reports, offered_depths)
    data = _parquet(table)
    header = ImportHeader(
        schema_id=schema_id(tuple(table.reports)),
        source_format=source_format,
        source_name=source.name,
        **_identity(source),
        entry_predicts=entry_predicts,
        max_misaligned=float(max_misaligned),
        drafters={name: _drafter(name, table, offered_depths) for name in table.reports},
        num_requests=table.positions.num_requests,
        num_positions=table.positions.num_rows,
        num_without_rounds=table.num_without_rounds,
        num_cut_tokens=table.num_cut_tokens,
        positions_digest=digest_of(data),
        positions_size_bytes=len(data),
        specctl_version=_version(),
    )
    contents = {POSITIONS_NAME: data, HEADER_NAME: header.to_bytes()}
    return publish_new(Path(folder).absolute(), contents, ImportedTraces.open)


def _check_depths(reports: Mapping[str, DrafterReport], depths: Mapping[str, int]) -> None:
    for name, depth in depths.items():
        if name not in reports or depth < reports[name].max_accepted:
            most = (
                f"{reports[name].max_accepted} accepted" if name in reports else "no such drafter"
            )
            raise UsageError(
                "--offered-depth",
                expected=f"a drafter of {', '.join(reports)} and at least what it had accepted",
                found=f"{name}={depth}, {most}",
                fix="state the draft length that the log was written with, or leave it out",
            )


def _drafter(name: str, table: AcceptanceTable, depths: Mapping[str, int]) -> ImportedDrafter:
    report, accepted = table.reports[name], table.num_accepted[name]
    depth = depths.get(name, report.max_accepted)
    return ImportedDrafter(
        offered_depth=depth,
        offered_depth_inferred=name not in depths,
        max_accepted=report.max_accepted,
        num_censored=int(censored(accepted, table.positions.remaining, depth).sum()),
        num_entries=report.num_entries,
        misaligned=report.misaligned,
    )


def _identity(source: Path) -> dict[str, Any]:
    with readable(source), source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"source_digest": f"sha256:{digest}", "source_size_bytes": stream.tell()}


def _version() -> str:
    from specctl import __version__

    return __version__


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
        "position": ascending(positions),
        "context_tokens": positions.context_tokens,
        "remaining": positions.remaining,
        **{PREFIX + name: values for name, values in table.num_accepted.items()},
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(arrays), sink, compression="zstd", use_dictionary=list(named))
    return sink.getvalue()


def ascending(positions: Positions) -> Ints:
    """`[R]` output tokens emitted before each position: 1, 2, ... in every request."""
    first = np.repeat(positions.start[:-1], np.diff(positions.start))
    return (np.arange(positions.num_rows) - first + 1).astype(np.int32)


def _read(path: Path, header: ImportHeader) -> ImportedTraces:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = _checked_bytes(path, header)
    try:
        # Not pq.read_table, nor threads: pyarrow's pool, beside torch, aborts a process that ends
        # soon after ("terminate called without an active exception", pyarrow 26, torch 2.13).
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        table = table.unify_dictionaries().combine_chunks()
    except pa.ArrowException as error:
        raise _damaged(path, "Parquet", "something else") from error
    if table.column_names != [*columns_of(tuple(header.drafters))]:
        raise _damaged(path, "the columns of its header", f"{table.column_names[:8]}")
    column = {name: table[name].combine_chunks() for name in table.column_names}
    starts = np.flatnonzero(column["position"].to_numpy() == 1)
    positions = _positions(column, np.concatenate([starts, [table.num_rows]]).astype(np.int64))
    accepted = {name: column[PREFIX + name].to_numpy() for name in header.drafters}
    _check_laws(path, column, positions, accepted)
    return ImportedTraces(header, positions, accepted)


def _checked_bytes(path: Path, header: ImportHeader) -> bytes:
    if not path.is_file():
        raise _damaged(path, f"{header.positions_size_bytes} bytes", "no file")
    data = path.read_bytes()
    if digest_of(data) != header.positions_digest:
        expected = f"{header.positions_size_bytes} bytes, {header.positions_digest[:19]}…"
        raise _damaged(path, expected, f"{len(data)} bytes, {digest_of(data)[:19]}…")
    return data


def _positions(column: Mapping[str, Any], start: Longs) -> Positions:
    first = start[:-1]
    return Positions(
        start=start,
        prompt=column["request_id"].indices.to_numpy()[first],
        prompt_ids=tuple(column["request_id"].dictionary.to_pylist()),
        category=column["category"].indices.to_numpy()[first],
        categories=tuple(column["category"].dictionary.to_pylist()),
        remaining=column["remaining"].to_numpy(),
        context_tokens=column["context_tokens"].to_numpy(),
    )


def _check_laws(
    path: Path, column: Mapping[str, Any], positions: Positions, accepted: Mapping[str, Ints]
) -> None:
    """A header with fitting digests may still have been written by hand."""
    size, remaining = np.diff(positions.start), positions.remaining
    position = ascending(positions) if len(size) else np.zeros(0, np.int32)
    request = column["request_id"].indices.to_numpy()
    laws = {
        "positions 1, 2, ... in every request": np.array_equal(
            column["position"].to_numpy(), position
        ),
        "each request once": np.array_equal(request, positions.request),
        "as many tokens remaining as positions": np.array_equal(
            remaining, np.repeat(size, size) - position + 1
        ),
        "accepted tokens within what remains": all(
            bool(((values >= 0) & (values <= remaining)).all()) for values in accepted.values()
        ),
    }
    for law, holds in laws.items():
        if not holds:
            raise _damaged(path, law, "otherwise")


def _damaged(path: Path, expected: str, found: str) -> TraceCorruptError:
    return TraceCorruptError(
        str(path), expected=expected, found=found, fix="import the source file again"
    )
