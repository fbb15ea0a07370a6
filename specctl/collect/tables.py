"""Rows of commits as Arrow tables: read whole, picked by prompt, joined and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specctl.collect.commits import Commit
from specctl.collect.places import Place
from specctl.errors import TraceCorruptError
from specctl.trace import TABLES, TIME_COLUMNS, arrow_schema

Tables = dict[str, Any]
"""`pyarrow.Table` by name of the trace format."""


def read_tables(place: Place, commit: Commit, without: Iterable[str] = ()) -> Tables:
    """The rows of a commit in their order.

    Args:
        without: prompts whose rows are left out.
    """
    import pyarrow.parquet as pq

    tables = {
        segment.table: pq.ParquetFile(place.segment_path(segment))
        .read(use_threads=False)
        .cast(arrow_schema(segment.table))
        for segment in commit.files
    }
    left_out = sorted(set(without) & set(commit.prompt_ids))
    return _picked(tables, left_out, are_kept=False) if left_out else tables


def join_tables(parts: Sequence[Tables]) -> Tables:
    """One after another, as one; dictionaries are unified."""
    import pyarrow as pa

    return {
        name: pa.concat_tables([part[name] for part in parts if name in part])
        .unify_dictionaries()
        .combine_chunks()
        for name in TABLES
        if any(name in part for part in parts)
    }


def check_equal_rows(place: Place, prompt: str, first: Commit, other: tuple[Place, Commit]) -> None:
    """Refuses two commits of one prompt whose rows differ in more than their times.

    Raises:
        TraceCorruptError: naming both.
    """
    import polars as pl

    sides = [_rows_of(at, commit, prompt) for at, commit in ((place, first), other)]
    for name in TABLES:
        one, two = (pl.from_arrow(side[name]) for side in sides)
        if not one.equals(two):  # type: ignore[arg-type]
            raise TraceCorruptError(
                f"prompt {prompt!r}, table {name}",
                expected=f"the rows of {place.at(first.key)}",
                found=f"others in {other[0].at(other[1].key)}",
                fix="collect that prompt again into a new set, and leave these two out",
            )


def _rows_of(place: Place, commit: Commit, prompt: str) -> Tables:
    """Rows of one prompt, without what differs when it is decoded again."""
    import pyarrow as pa

    empty = {name: arrow_schema(name).empty_table() for name in TABLES}
    tables = empty | _picked(empty | read_tables(place, commit), [prompt], are_kept=True)
    for name, rows in tables.items():
        rows = rows.drop_columns([column for column in TIME_COLUMNS if column in rows.schema.names])
        plain = [
            pa.field(field.name, pa.string()) if pa.types.is_dictionary(field.type) else field
            for field in rows.schema
        ]
        tables[name] = rows.cast(pa.schema(plain))
    return tables


def _picked(tables: Tables, prompts: Sequence[str], *, are_kept: bool) -> Tables:
    """Rows of these prompts, or of all others; nodes go with the requests of their rounds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rounds = tables["rounds"]
    chosen = pc.is_in(rounds["prompt_id"].cast(pa.string()), pa.array(prompts, pa.string()))
    requests = rounds.filter(chosen)["request_id"].cast(pa.string()).unique()
    nodes = tables["nodes"]
    with_them = pc.is_in(nodes["request_id"].cast(pa.string()), requests)
    keep = (lambda mask: mask) if are_kept else pc.invert
    return {"rounds": rounds.filter(keep(chosen)), "nodes": nodes.filter(keep(with_them))}
