"""Reads Parquet files that others made, in a process that may die of it; see `foreign`.

Parquet readers trust what they read. So a file of a stranger is opened here first, with little
memory and time, its claims checked before anything is decoded. Then all of it is read by both
libraries that read segments here, pyarrow and polars, validated, and held against the laws of rows.
Standard input has one JSON line a file; standard output has `begin N`, then `ok N` or
`refused N REASON`, so that the parent knows which file a crash belongs to. `lean` in the beginning
means that this machine gives less memory than a file may need; `starved N` that it did not do.
"""

from __future__ import annotations

import json
import math
import resource
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.collect.expansion import MAX_TEXT_BYTES, expanded_limit, row_bytes, text_bytes
from specctl.collect.row_laws import ROUND_KEY, check_owners, check_prompts, check_table

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

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
_held: dict[Path, pl.DataFrame] = {}
"""Keys of the rounds that were read last: their nodes come next."""


class RefusedError(Exception):
    """What is wrong with a file, in one line."""


@dataclass(frozen=True)
class Question:
    """A file, and what is said of it.

    Attributes:
        prompt_ids: those that its commit's record names; None: nothing is known of its commit.
        rounds: the file with the rounds of that commit, which has been inspected.
    """

    path: Path
    table: str
    num_rows: int
    prompt_ids: Iterable[str] | None = None
    rounds: Path | None = None

    @classmethod
    def from_json(cls, line: str) -> Question:
        asked = json.loads(line)
        rounds = asked["rounds"]
        places = {"path": Path(asked["path"]), "rounds": None if rounds is None else Path(rounds)}
        return cls(**{**asked, **places})


def inspect(asked: Question) -> None:
    """Reads all of a file.

    Raises:
        RefusedError: it is not a sound table of that name and size.
        RowError: its rows cannot be what a writer wrote for that record.
        Exception: whatever pyarrow or polars makes of it.
    """
    import pyarrow.parquet as pq

    _check_footer_size(asked.path)
    file = pq.ParquetFile(asked.path)
    _check_claims(file.metadata, asked)
    _check_columns(file.schema_arrow, asked.table)
    _check_batches(file, asked)
    rows = _frame(asked.path)
    check_table(asked.table, rows)
    if asked.prompt_ids is not None:
        _check_commit(asked, rows)


def _check_commit(asked: Question, rows: pl.DataFrame) -> None:
    if asked.table == "rounds":
        check_prompts(rows, asked.prompt_ids or ())
        _held.clear()
        _held[asked.path] = rows[list(ROUND_KEY)]
    else:
        check_owners(rows, rows.clear() if asked.rounds is None else _keys(asked.rounds))


def _check_batches(file: pq.ParquetFile, asked: Question) -> None:
    limit = expanded_limit(asked.path.stat().st_size) - asked.num_rows * row_bytes(asked.table)
    seen = 0
    for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
        batch.validate(full=True)
        seen += batch.num_rows
        longest, whole = text_bytes(batch)
        limit -= whole
        if longest > MAX_TEXT_BYTES:
            raise RefusedError(f"a text of {longest} bytes")
        if limit < 0:
            raise RefusedError("texts that are far larger than the file when written out")
    if seen != asked.num_rows:
        raise RefusedError(f"{seen} rows instead of {asked.num_rows}")


def _frame(path: Path, columns: Iterable[str] | None = None) -> pl.DataFrame:
    """As `TraceSet.scan` reads it."""
    import polars as pl

    rows = pl.scan_parquet([path], glob=False)
    return (rows if columns is None else rows.select(columns)).collect()


def _keys(rounds: Path) -> pl.DataFrame:
    """Of the rounds that were inspected a moment ago, or by an earlier child."""
    return _held[rounds] if rounds in _held else _frame(rounds, ROUND_KEY)


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


def _check_claims(metadata: pq.FileMetaData, asked: Question) -> None:
    num_rows, size = asked.num_rows, asked.path.stat().st_size
    if metadata.num_rows != num_rows or num_rows > MAX_ROWS:
        raise RefusedError(f"a footer of {metadata.num_rows} rows instead of {num_rows}")
    if num_rows * row_bytes(asked.table) > expanded_limit(size):
        raise RefusedError(f"{num_rows} rows in {size} bytes")
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if not 0 <= group.total_byte_size <= MAX_GROUP_BYTES:
            raise RefusedError(f"a row group of {group.total_byte_size} bytes")
        for place in range(group.num_columns):
            chunk = group.column(place)
            whole, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
            if not 0 <= whole <= MAX_RATIO * max(packed, 1):
                raise RefusedError(f"column {place} of {packed} bytes that unpack to {whole}")


def _check_columns(found: pa.Schema, table: str) -> None:
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
    if not has_memory:
        _say("lean")
    import polars  # noqa: F401  what fails here is no file's fault
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

    refused: set[Path | None] = set()
    for number, line in enumerate(sys.stdin):
        asked = Question.from_json(line)
        if asked.rounds in refused:
            asked = replace(asked, prompt_ids=None, rounds=None)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + MAX_CPU_S, for_good=False)
        _say(f"begin {number}")
        try:
            inspect(asked)
        except MemoryError as error:
            if not has_memory:
                _say(f"starved {number}")
                raise
            if number:  # perhaps of the files before; a new process tries again
                raise
            refused.add(asked.path)
            _say(_refusal(number, error))
        # Of a stranger's file a library may raise anything; all of it means no.
        except Exception as error:
            refused.add(asked.path)
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
