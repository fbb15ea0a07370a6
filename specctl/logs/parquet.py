"""Reading Parquet files of traces; errors of polars and pyarrow become `TraceCorruptError`.

Files with the right digest may still fail to decode, and lazy frames are read long after
`TraceSet.open`, so every reader goes through these functions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import TraceCorruptError, memory_error_of, reason_of
from specctl.trace import TABLES, arrow_schema

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turns errors of the reading libraries into `TraceCorruptError` naming `what`, or into
    `HostMemoryError`."""
    found: list[type[BaseException]] = [OSError, UnicodeDecodeError]
    try:
        yield
    except BaseException as error:
        if (refusal := memory_error_of(error)) is not None:
            raise refusal from error
        if "pyarrow" in sys.modules:
            found.append(sys.modules["pyarrow"].ArrowException)
        if "polars" in sys.modules:
            theirs = sys.modules["polars"].exceptions
            found += [theirs.PolarsError, theirs.PanicException]
        if isinstance(error, tuple(found)):
            reason = f"its bytes cannot be decoded ({type(error).__name__})"
            if isinstance(error, OSError) and error.errno:
                reason = reason_of(error)
            elif column := re.match(r'unable to find column "(\w+)"', str(error)):
                reason = f"it has no column {column[1]}"
            raise _undecodable(what, reason) from error
        raise


def collected(rows: pl.LazyFrame, what: str = "trace files") -> pl.DataFrame:
    """The rows of a lazy frame over trace files.

    Raises:
        TraceCorruptError: a file that cannot be decoded, or lacks a column.
    """
    with decoding(what):
        return rows.collect()


def scan_files(table: str, paths: Sequence[Path]) -> pl.LazyFrame:
    """The rows of files of one table, lazily."""
    import polars as pl

    if paths:
        return pl.scan_parquet(list(paths), glob=False)
    return pl.from_arrow(arrow_schema(table).empty_table()).lazy()  # type: ignore[union-attr]


def read_columns(path: Path, columns: Sequence[str]) -> Any:
    """Columns of a file, as a `pyarrow.Table`."""
    import pyarrow.parquet as pq

    with decoding(str(path)):
        file = pq.ParquetFile(path, page_checksum_verification=True)
        if missing := sorted(set(columns) - set(file.schema_arrow.names)):  # pyarrow ignores them
            raise _undecodable(str(path), f"it has no column {missing[0]}")
        # Not pq.read_table: threads of pyarrow's pool, beside torch's, abort an ending process.
        return file.read(list(columns), use_threads=False)


def _undecodable(what: str, reason: str) -> TraceCorruptError:
    return TraceCorruptError(
        f"{what} cannot be read: {reason}",
        hint="`specctl traces verify` names the file; go on without it, or fetch it again",
    )


# --------------------------------------------------------------------------- whole tables


Tables = dict[str, "pa.Table"]
"""Tables by name; one without rows may be absent."""


def read_tables(paths: dict[str, Path]) -> Tables:
    """All rows of a segment's files, in the columns and types of the format; `row_checks` finds
    forbidden nulls."""
    import pyarrow as pa

    tables = {}
    for table, path in paths.items():
        schema = pa.schema([field.with_nullable(True) for field in arrow_schema(table)])
        rows = read_columns(path, schema.names)
        with decoding(str(path)):
            tables[table] = rows.select(schema.names).cast(schema)
    return tables


def join_tables(parts: Sequence[Tables]) -> Tables:
    """Tables one after another; dictionaries are unified."""
    import pyarrow as pa

    found = {name: [part[name] for part in parts if name in part] for name in TABLES}
    return {
        name: pa.concat_tables(rows, promote_options="default")
        .unify_dictionaries()
        .combine_chunks()
        for name, rows in found.items()
        if rows
    }


def drop_prompts(tables: Tables, prompts: Iterable[str]) -> Tables:
    """The rows of all other prompts and the nodes of their requests."""
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = {name: arrow_schema(name).empty_table() for name in TABLES} | tables
    rounds, nodes = tables["rounds"], tables["nodes"]
    lost = pc.is_in(rounds["prompt_id"].cast(pa.string()), pa.array(sorted(prompts), pa.string()))
    requests = rounds.filter(lost)["request_id"].cast(pa.string()).unique()
    with_them = pc.is_in(nodes["request_id"].cast(pa.string()), requests)
    return {"rounds": rounds.filter(pc.invert(lost)), "nodes": nodes.filter(pc.invert(with_them))}
