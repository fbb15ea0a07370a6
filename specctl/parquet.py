"""Reading the Parquet files of traces: what polars or pyarrow cannot decode is a refusal of ours.

A digest shows that bytes are what was committed, not that anybody can decode them. Lazy frames and
columns are read far behind `TraceSet.open`, which decodes the keys alone. So whoever reads them
does it through these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import TraceCorruptError
from specctl.plain_text import shown

if TYPE_CHECKING:
    import polars as pl


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """What a library says of files while it reads them, as a refusal.

    Raises:
        TraceCorruptError: naming `what`, in the library's words.
    """
    try:
        yield
    except MemoryError:  # pyarrow's too: no file's fault
        raise
    except _their_errors() as error:
        raise _undecodable(what, str(error)) from error


def collected(rows: pl.LazyFrame, what: str = "trace files") -> pl.DataFrame:
    """The rows of a lazy frame over trace files.

    Raises:
        TraceCorruptError: a file that cannot be decoded, or lacks a column.
    """
    with decoding(what):
        return rows.collect()


def read_columns(path: Path, columns: Sequence[str]) -> Any:
    """Columns of a file, as a `pyarrow.Table`.

    Raises:
        TraceCorruptError: as `collected`.
    """
    with decoding(str(path)):
        # Not pq.read_table: threads of pyarrow's pool, beside torch's, abort a process that ends.
        return _opened(path, columns).read(list(columns), use_threads=False)


def read_batches(path: Path, columns: Sequence[str], batch_rows: int) -> Iterator[Any]:
    """The same as one `pyarrow.RecordBatch` after another."""
    with decoding(str(path)):
        yield from _opened(path, columns).iter_batches(
            batch_size=batch_rows, columns=list(columns), use_threads=False
        )


def _opened(path: Path, columns: Sequence[str]) -> Any:
    """A `ParquetFile`; of columns that it lacks pyarrow would say nothing."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    missing = sorted(set(columns) - set(file.schema_arrow.names))
    if missing:
        raise _undecodable(str(path), f"no column {missing[0]}")
    return file


def _undecodable(what: str, found: str) -> TraceCorruptError:
    return TraceCorruptError(
        what,
        expected="Parquet files with the columns of the format",
        found=shown(" ".join(found.split()), max_chars=200),
        fix="`specctl traces verify` names the file; go on without it, or fetch it again",
    )


def _their_errors() -> tuple[type[BaseException], ...]:
    """Of the libraries that are in use; pyarrow also raises what Python itself has."""
    found: list[type[BaseException]] = [OSError, UnicodeDecodeError]
    if "pyarrow" in sys.modules:
        found.append(sys.modules["pyarrow"].ArrowException)
    if "polars" in sys.modules:
        theirs = sys.modules["polars"].exceptions
        found += [theirs.PolarsError, theirs.PanicException]
    return tuple(found)
