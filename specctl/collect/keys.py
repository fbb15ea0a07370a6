"""The keys of all rows of a set: whether any row counts twice, or for a prompt nobody named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.collect.files import segment_path
from specctl.collect.logs import CommitLog
from specctl.collect.row_laws import (
    KEYS,
    ROUND_KEY,
    RowError,
    check_owners,
    check_prompts,
    check_table,
)
from specctl.errors import TraceCorruptError
from specctl.parquet import decoding
from specctl.plain_text import shown
from specctl.trace import TABLES, arrow_schema

if TYPE_CHECKING:
    import polars as pl

BATCH_ROWS = 1 << 23
"""Of commits whose nodes are looked at together, about."""
Paths = dict[str, list[Path]]
"""Files by table."""


def check_keys(logs: Sequence[CommitLog]) -> None:
    """Reads the key columns, and those of parents, of every committed row.

    Rounds are looked at all together. Nodes are not: their rounds stand in the same commit, so
    what is unique there is unique in the set.

    Raises:
        TraceCorruptError: a key that is null or stands twice, rows of a prompt that no record
            names, nodes without their round or before their parent, or a file that cannot be read.
    """
    name = " + ".join(log.place.name for log in logs)
    with decoding(f"trace set {name}"):
        paths = [files for log in logs for files in _paths(log)]
        try:
            rounds = _rounds(_joined(paths), [prompt for log in logs for prompt in log.prompt_ids])
            for files in paths:
                of_batch = rounds if len(paths) == 1 else _frame("rounds", files, ROUND_KEY)
                _check_nodes(files, of_batch)
        except RowError as error:
            raise broken_rows(f"trace set {name}", error) from error


def broken_rows(what: str, error: RowError) -> TraceCorruptError:
    """The error of a commit or set whose rows break a law."""
    return TraceCorruptError(
        what,
        expected="rows as a writer makes them",
        found=shown(str(error)),
        fix="find the commit with `specctl traces verify` and leave it out (`specctl traces "
        "snapshot TRACES --without COMMIT`), or collect into a new set",
    )


def scan_files(table: str, paths: Sequence[Path]) -> pl.LazyFrame:
    """The rows of files of one table, lazily."""
    import polars as pl

    if paths:
        return pl.scan_parquet(list(paths), glob=False)
    return pl.from_arrow(arrow_schema(table).empty_table()).lazy()  # type: ignore[union-attr]


def _rounds(files: Paths, prompt_ids: Iterable[str]) -> pl.DataFrame:
    rounds = _frame("rounds", files, (*ROUND_KEY, "prompt_id"))
    check_table("rounds", rounds)
    check_prompts(rounds, prompt_ids)
    return rounds


def _check_nodes(files: Paths, rounds: pl.DataFrame) -> None:
    nodes = _frame("nodes", files, (*KEYS["nodes"], "parent_idx"))
    check_table("nodes", nodes)
    check_owners(nodes, rounds)


def _frame(table: str, files: Paths, columns: Sequence[str]) -> pl.DataFrame:
    """Key columns, in the types that the laws need."""
    import polars as pl

    rows = scan_files(table, files[table])
    kinds = {name: pl.Int32 if name.endswith("_idx") else pl.Categorical for name in columns}
    return rows.select(pl.col(name).cast(kind) for name, kind in kinds.items()).collect()


def _paths(log: CommitLog) -> Iterator[Paths]:
    """Files of some commits together, again and again until all had their turn."""
    paths, num_rows = _joined([]), 0
    for commit in log.commits:
        if num_rows and num_rows + commit.num_rows > BATCH_ROWS:
            yield paths
            paths, num_rows = _joined([]), 0
        num_rows += commit.num_rows
        for segment in commit.files:
            paths[segment.table].append(segment_path(log.place, segment))
    yield paths


def _joined(parts: Iterable[Paths]) -> Paths:
    parts = list(parts)
    return {table: [path for part in parts for path in part[table]] for table in TABLES}
