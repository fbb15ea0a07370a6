"""Rows of commits as Arrow tables: read whole, picked by prompt, joined and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specctl.collect.commits import Commit, Segment
from specctl.collect.files import segment_path
from specctl.collect.keys import broken_rows
from specctl.collect.places import Place
from specctl.collect.row_laws import RowError, check_rows
from specctl.errors import TraceCorruptError
from specctl.parquet import decoding, read_columns
from specctl.trace import TABLES, TIME_COLUMNS, arrow_schema

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    Rows = dict[str, dict[str, pl.DataFrame]]  # by table and prompt

PROMPT = "prompt_id"
Tables = dict[str, "pa.Table"]
"""By name of the trace format; a table without rows may be absent."""


def read_tables(place: Place, commit: Commit, without: Iterable[str] = ()) -> Tables:
    """The rows of a commit in their order.

    Args:
        without: prompts whose rows are left out.

    Raises:
        TraceCorruptError: rows that no writer wrote for this commit.
    """
    tables = {segment.table: _read(place, segment) for segment in commit.files}
    _check(place, commit, tables)
    with decoding(place.at(commit.key)):
        tables = {name: rows.cast(arrow_schema(name)) for name, rows in tables.items()}
    left_out = sorted(set(without) & set(commit.prompt_ids))
    return _without(tables, left_out) if left_out else tables


def _read(place: Place, segment: Segment) -> pa.Table:
    names = [column.name for column in TABLES[segment.table]]
    rows = read_columns(segment_path(place, segment), names).select(names)
    with decoding(place.at(segment.key)):  # nulls where none may be are for the laws to name
        return rows.cast(_nullable(segment.table))


def _nullable(table: str) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([field.with_nullable(True) for field in arrow_schema(table)])


def _check(place: Place, commit: Commit, tables: Tables) -> None:
    import polars as pl

    try:
        check_rows({name: pl.DataFrame(rows) for name, rows in tables.items()}, commit.prompt_ids)
    except RowError as error:
        raise broken_rows(place.at(commit.key), error) from error


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


class Comparison:
    """Whether commits have equal rows of a prompt, each commit being read once for many prompts.

    The last two that were read stay in memory, so ask in an order that keeps one of them.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Rows] = {}

    def check(
        self, prompts: Iterable[str], first: tuple[Place, Commit], other: tuple[Place, Commit]
    ) -> None:
        """Refuses prompts whose rows differ between two commits in more than their times.

        Raises:
            TraceCorruptError: naming both.
        """
        one, two = self._rows(*first), self._rows(*other)
        for prompt in prompts:
            for name in TABLES:
                if not _are_equal(one[name].get(prompt), two[name].get(prompt)):
                    raise _different(prompt, name, first, other)

    def _rows(self, place: Place, commit: Commit) -> Rows:
        key = (place.name, commit.digest)
        rows = self._held.pop(key, None)
        if rows is None:
            while len(self._held) > 1:
                del self._held[next(iter(self._held))]
            rows = _by_prompt(read_tables(place, commit))
        self._held[key] = rows  # the youngest
        return rows


def _are_equal(one: pl.DataFrame | None, two: pl.DataFrame | None) -> bool:
    """None: no rows, as of a prompt that gave no round."""
    return one is two if one is None or two is None else one.equals(two)


def _different(
    prompt: str, table: str, first: tuple[Place, Commit], other: tuple[Place, Commit]
) -> TraceCorruptError:
    return TraceCorruptError(
        f"prompt {prompt!r}, table {table}",
        expected=f"the rows of {first[0].at(first[1].key)}",
        found=f"others in {other[0].at(other[1].key)}",
        fix="leave one of the two commits out with `specctl traces snapshot TRACES --without "
        "COMMIT` and use what that names, or collect the prompt again into a new set",
    )


def _by_prompt(tables: Tables) -> Rows:
    """Rows of each prompt in their order, without what differs when it is decoded again."""
    import polars as pl

    frames = {}
    for name in TABLES:
        rows = tables.get(name, arrow_schema(name).empty_table())
        texts = pl.col(pl.Categorical).cast(pl.String)
        frames[name] = pl.DataFrame(rows).drop(TIME_COLUMNS, strict=False).with_columns(texts)
    owners = frames["rounds"].select("request_id", PROMPT).unique()
    frames["nodes"] = frames["nodes"].join(
        owners, on="request_id", how="left", maintain_order="left"
    )
    return {name: _parts(frame) for name, frame in frames.items()}


def _parts(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    parts = frame.partition_by(PROMPT, as_dict=True, maintain_order=True)
    return {str(prompt): part for (prompt,), part in parts.items()}


def _without(tables: Tables, prompts: Sequence[str]) -> Tables:
    """Rows of all other prompts; nodes go with the requests of their rounds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = {name: arrow_schema(name).empty_table() for name in TABLES} | tables
    rounds, nodes = tables["rounds"], tables["nodes"]
    among = pc.is_in(rounds[PROMPT].cast(pa.string()), pa.array(prompts, pa.string()))
    requests = rounds.filter(among)["request_id"].cast(pa.string()).unique()
    with_them = pc.is_in(nodes["request_id"].cast(pa.string()), requests)
    return {"rounds": rounds.filter(pc.invert(among)), "nodes": nodes.filter(pc.invert(with_them))}
