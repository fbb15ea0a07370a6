"""One Arrow table to one complete Parquet segment, whose bytes nobody else ever writes.

A segment is named by its digest, and a pruner judges a name that no record holds by its age. If two
writers could make equal bytes, a new one would adopt the name of an old orphan, with the orphan's
age, and the pruner could remove what has just been acknowledged. So each file holds a nonce: a
name has one writer, who gave it its age a moment before the record, in a folder as in a bucket.
Making an adopted file young again would need the store to change an object, which no bucket
offers. Nothing is lost by it: a repeated put still compares bytes of the same file, and a writer
that starts again leaves the files of the one that died to the pruner, as before.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.collect.commits import MAX_SEGMENT_BYTES, Segment
from specctl.collect.expansion import MAX_TEXT_BYTES, expanded_limit, row_bytes, text_bytes
from specctl.collect.places import Place
from specctl.durable import file_sha256
from specctl.errors import OutputError
from specctl.stores import create_file
from specctl.trace import TABLES, arrow_schema, schema_id

if TYPE_CHECKING:
    import pyarrow as pa


def write_segment(place: Place, temporary: Path, table: str, rows: pa.Table) -> Segment:
    """Writes, re-reads, syncs and publishes a table.

    Args:
        temporary: a path that does not exist yet, on the file system of a set that is a folder;
            it is gone afterwards.
        rows: with the columns of `table`.

    Raises:
        OutputError: what was read back is not what was written, or it is too large for a reader.
        StoreError, OSError: the store or the operating system refuses.
    """
    try:
        write_parquet(temporary, table, rows)
        _check_size(temporary, table, rows)
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


def write_parquet(path: Path, table: str, rows: pa.Table) -> None:
    """Dictionaries only for strings that repeat; split bytes for floats, which compress by sign
    and exponent; zstd over all."""
    import pyarrow.parquet as pq

    columns = TABLES[table]
    with path.open("xb") as stream:
        pq.write_table(
            rows.cast(_schema_of_one_file(table)),
            stream,
            compression="zstd",
            use_dictionary=[column.name for column in columns if column.dtype == "dictionary"],
            use_byte_stream_split=[column.name for column in columns if column.dtype == "float32"],
        )


def _schema_of_one_file(table: str) -> pa.Schema:
    """Columns as everywhere; metadata that no other file has."""
    schema = arrow_schema(table)
    return schema.with_metadata({**schema.metadata, b"specctl.nonce": uuid.uuid4().hex})


def _check_size(path: Path, table: str, rows: pa.Table) -> None:
    """What a reader of strangers would refuse must never be acknowledged."""
    size = path.stat().st_size
    longest, texts = text_bytes(rows)
    expanded = rows.num_rows * row_bytes(table) + texts
    if size > MAX_SEGMENT_BYTES or expanded > expanded_limit(size):
        raise OutputError(
            str(path),
            expected=f"a file of at most {MAX_SEGMENT_BYTES} bytes, and "
            f"{expanded_limit(size)} with its texts written out",
            found=f"{size} bytes, and {expanded}",
            fix="commit fewer prompts at a time (`traces compact --target-rows`), or name them "
            "shorter",
        )
    if longest > MAX_TEXT_BYTES:
        raise OutputError(
            str(path),
            expected=f"names of at most {MAX_TEXT_BYTES} bytes",
            found=f"one of {longest} bytes",
            fix="give prompts, categories and models shorter names",
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
