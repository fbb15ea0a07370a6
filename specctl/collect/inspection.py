"""Reads Parquet files that others made, in a process that may die of it; see `foreign`.

Parquet readers trust what they read. So a file of a stranger is opened here first, with little
memory and time, its claims checked before anything is decoded, then all of it read and validated.
Standard input has one JSON line a file; standard output has `begin N`, then `ok N` or
`refused N REASON`, so that the parent knows which file a crash belongs to. `starved N` and the end
mean that this machine gives less memory than a file may need.
"""

from __future__ import annotations

import json
import math
import resource
import struct
import sys
import time
from pathlib import Path
from typing import Any

MAX_MEMORY_BYTES = 8 << 30
"""Address space, of which pyarrow alone maps more than one GiB."""
MAX_CPU_S = 600
"""Of one file."""
MAX_FOOTER_BYTES = 16 << 20
MAX_ROWS = 1 << 31
MAX_RATIO = 2000
"""Decompressed over compressed bytes of a column chunk; runs of one value reach some hundreds."""
MAX_GROUP_BYTES = 4 << 30
"""Decompressed, of one row group: what has to be in memory together."""
BATCH_ROWS = 1 << 16


class RefusedError(Exception):
    """What is wrong with a file, in one line."""


def inspect(path: Path, table: str, num_rows: int) -> None:
    """Reads all of a file.

    Raises:
        RefusedError: it is not a sound table of that name and size.
        Exception: whatever pyarrow makes of it.
    """
    import pyarrow.parquet as pq

    _check_footer_size(path)
    file = pq.ParquetFile(path)
    _check_claims(file.metadata, num_rows)
    _check_columns(file.schema_arrow, table)
    seen = 0
    for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
        batch.validate(full=True)
        seen += batch.num_rows
    if seen != num_rows:
        raise RefusedError(f"{seen} rows instead of {num_rows}")


def _check_footer_size(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(size - 8, 0))
        tail = stream.read()
    if len(tail) < 8 or tail[4:] != b"PAR1":
        raise RefusedError("no Parquet footer")
    (footer,) = struct.unpack("<I", tail[:4])
    if footer > min(MAX_FOOTER_BYTES, size - 12):
        raise RefusedError(f"a footer of {footer} bytes")


def _check_claims(metadata: Any, num_rows: int) -> None:
    if metadata.num_rows != num_rows or num_rows > MAX_ROWS:
        raise RefusedError(f"a footer of {metadata.num_rows} rows instead of {num_rows}")
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if not 0 <= group.total_byte_size <= MAX_GROUP_BYTES:
            raise RefusedError(f"a row group of {group.total_byte_size} bytes")
        for place in range(group.num_columns):
            chunk = group.column(place)
            whole, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
            if not 0 <= whole <= MAX_RATIO * max(packed, 1):
                raise RefusedError(f"column {place} of {packed} bytes that unpack to {whole}")


def _check_columns(found: Any, table: str) -> None:
    """Names and types in their order; whether a column may be null differs between versions."""
    from specctl.trace import arrow_schema

    wanted = [(field.name, str(field.type)) for field in arrow_schema(table)]
    have = [(field.name, str(field.type)) for field in found]
    if have != wanted:
        odd = next((h for h, w in zip(have, wanted, strict=False) if h != w), None)
        raise RefusedError(f"columns other than those of {table}: {odd or len(have)}")


def main() -> None:
    """Inspects the files named on standard input, one after another."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    has_memory = _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES, for_good=True)
    import pyarrow.parquet  # noqa: F401  what fails here is no file's fault

    import specctl.trace  # noqa: F401

    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + MAX_CPU_S, for_good=False)
        _say(f"begin {number}")
        try:
            inspect(Path(asked["path"]), asked["table"], asked["num_rows"])
        except MemoryError as error:
            if not has_memory:
                _say(f"starved {number}")
                raise
            if number:  # perhaps of the files before; a new process tries again
                raise
            _say(_refusal(number, error))
        # Of a stranger's file a library may raise anything; all of it means no.
        except Exception as error:
            _say(_refusal(number, error))
        else:
            _say(f"ok {number}")


def _limit(kind: int, wanted: int, *, for_good: bool) -> bool:
    """Sets a limit of this process, or leaves the lower one that it was given: then false."""
    _, hard = resource.getrlimit(kind)
    has_it = hard == resource.RLIM_INFINITY or wanted <= hard
    soft = wanted if has_it else hard
    resource.setrlimit(kind, (soft, soft if for_good else hard))
    return has_it


def _refusal(number: int, error: Exception) -> str:
    return f"refused {number} {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
