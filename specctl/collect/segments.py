"""One Arrow table to one complete Parquet segment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.collect.commits import Segment
from specctl.collect.places import Place
from specctl.durable import file_sha256
from specctl.errors import OutputError
from specctl.stores import create_file
from specctl.trace import TABLES, arrow_schema, schema_id


def write_segment(place: Place, temporary: Path, table: str, rows: Any) -> Segment:
    """Writes, re-reads, syncs and publishes a table.

    Args:
        temporary: a path that does not exist yet, on the file system of a set that is a folder;
            it is gone afterwards.
        rows: `pyarrow.Table` with the columns of `table`.

    Raises:
        OutputError: what was read back is not what was written.
        StoreError, OSError: the store or the operating system refuses.
    """
    try:
        write_parquet(temporary, table, rows)
        _check_readable(temporary, table, rows.num_rows)
        segment = Segment(
            table=table,
            sha256="sha256:" + file_sha256(temporary),
            size_bytes=temporary.stat().st_size,
            num_rows=rows.num_rows,
            schema_id=schema_id(table),
        )
        create_file(place.store, segment.key, temporary)
    finally:
        temporary.unlink(missing_ok=True)
    return segment


def write_parquet(path: Path, table: str, rows: Any) -> None:
    """Dictionaries only for strings that repeat; split bytes for floats, which compress by sign
    and exponent; zstd over all."""
    import pyarrow.parquet as pq

    columns = TABLES[table]
    with path.open("xb") as stream:
        pq.write_table(
            rows.cast(arrow_schema(table)),
            stream,
            compression="zstd",
            use_dictionary=[column.name for column in columns if column.dtype == "dictionary"],
            use_byte_stream_split=[column.name for column in columns if column.dtype == "float32"],
        )


def _check_readable(path: Path, table: str, num_rows: int) -> None:
    """A segment without a readable footer must never be acknowledged."""
    import pyarrow.parquet as pq

    footer = pq.read_metadata(path)
    identity = (footer.metadata or {}).get(b"specctl.schema_id", b"none").decode()
    if (footer.num_rows, identity) != (num_rows, schema_id(table)):
        raise OutputError(
            str(path),
            expected=f"{num_rows} rows of schema {schema_id(table)[:19]}…",
            found=f"{footer.num_rows} rows of {identity[:19]}…",
            fix="check the disk, then go on with --resume",
        )
