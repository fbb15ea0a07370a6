"""Checks of rows: within a table, between tables, and against the segment's record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.errors import TraceCorruptError, shown
from specctl.logs.parquet import decoding, scan_files
from specctl.trace import TABLES

if TYPE_CHECKING:
    import polars as pl

ROUND_KEY = ("request_id", "round_idx")
KEYS = {"rounds": ROUND_KEY, "nodes": (*ROUND_KEY, "node_idx")}


class RowError(Exception):
    """A failed check, in one line."""


def check_rows(tables: Mapping[str, pl.DataFrame], prompt_ids: Iterable[str]) -> None:
    """Raises `RowError` of the first failed check of a segment; a table without rows may be absent.

    Args:
        prompt_ids: of the segment's record.
    """
    for table, rows in tables.items():
        check_table(table, rows)
    if "rounds" in tables:
        check_prompts(tables["rounds"], prompt_ids)
    if "nodes" in tables:
        check_owners(tables["nodes"], tables.get("rounds", tables["nodes"].clear()))


def check_table(table: str, rows: pl.DataFrame) -> None:
    """Checks one table: required columns hold no null, keys are unique, parents come first.

    Args:
        rows: with the key's columns; other absent columns are skipped.
    """
    import polars as pl

    for column in TABLES[table]:
        if not column.nullable and column.name in rows.columns and rows[column.name].null_count():
            raise RowError(f"a null stands in column {column.name}")
    # Writers put nodes round by round in rising order; then no key can be repeated.
    last, run = pl.col(KEYS[table][-1]), pl.struct(ROUND_KEY).rle_id()
    is_rising = rows.select((last > last.shift()) | (run > run.shift())).to_series().all()
    if table == "rounds" or not is_rising or _runs(rows).is_duplicated().any():
        counted = rows.lazy().group_by(KEYS[table]).len().filter(pl.col("len") > 1)
        twice = counted.head(1).collect()
        if len(twice):
            raise RowError(f"({', '.join(KEYS[table])}) {twice.row(0)[:-1]} stands twice")
    if "parent_idx" in rows.columns:
        is_late = (pl.col("parent_idx") >= pl.col("node_idx")) | (pl.col("parent_idx") < -1)
        late = rows.select(*KEYS["nodes"], "parent_idx").filter(is_late)
        if len(late):
            found = late.row(0, named=True)
            raise RowError(f"a parent does not stand before its node: {found}")


def check_prompts(rounds: pl.DataFrame, prompt_ids: Iterable[str]) -> None:
    """Checks that the record names the prompt of every round; a prompt may have no round."""
    found = rounds["prompt_id"].unique().to_list()
    unknown = sorted(set(found).difference(prompt_ids))
    if unknown:
        raise RowError(f"the segment's record does not name prompt {unknown[0]!r} of its rows")


def check_owners(nodes: pl.DataFrame, rounds: pl.DataFrame) -> None:
    """Checks that nodes belong to rounds of the segment and stand in the order of the rounds.

    Replay reads both tables side by side, so another order would swap trees of equal size.
    """
    places = rounds.select(ROUND_KEY).with_row_index("place")
    runs = _runs(nodes).join(places, on=ROUND_KEY, how="left", maintain_order="left")
    place = runs["place"]
    if place.null_count():
        found = runs.row(place.is_null().arg_max() or 0)[:-1]
        raise RowError(f"nodes of round {found} have no row in `rounds`")
    is_behind = place <= place.shift()
    if is_behind.any():
        found = runs.row(is_behind.arg_max() or 0)[:-1]
        raise RowError(f"nodes of round {found} stand behind those of a later one")


def _runs(rows: pl.DataFrame) -> pl.DataFrame:
    """One row for each run of rows of the same round."""
    import polars as pl

    rounds = rows.select(pl.struct(ROUND_KEY).rle().struct.field("value"))
    return rounds.unnest("value")


# --------------------------------------------------------------------------- files


def check_keys(name: str, files: Iterable[dict[str, Path]], prompt_ids: Iterable[str]) -> None:
    """Reads the key columns and the parents of every row.

    Raises:
        TraceCorruptError: a null or repeated key, a request in two segments, rows of a prompt that
            no record names, nodes without their round or before their parent, or an unreadable
            file.
    """
    import polars as pl

    parts, prompts = [], frozenset(prompt_ids)
    with decoding(name):
        try:
            for paths in files:
                tables = {table: _key_columns(table, path) for table, path in paths.items()}
                check_rows(tables, prompts)
                if "rounds" in tables:
                    parts.append(tables["rounds"].select("request_id").unique())
            requests = pl.concat(parts)["request_id"] if parts else pl.Series(dtype=pl.String)
            twice = requests.filter(requests.is_duplicated())
            if len(twice):
                raise RowError(f"two segments hold rounds of request {twice[0]!r}")
        except RowError as error:
            raise broken_rows(name, error) from error


def broken_rows(what: str, error: RowError) -> TraceCorruptError:
    """The refusal of a segment or set whose rows fail a check."""
    return TraceCorruptError(
        f"{what} has damaged rows: {shown(str(error))}",
        hint=(
            "find the segment with `specctl traces verify`, and collect its prompts again into "
            "a new set"
        ),
    )


def _key_columns(table: str, path: Path) -> pl.DataFrame:
    import polars as pl

    columns = (*KEYS[table], "prompt_id" if table == "rounds" else "parent_idx")
    kinds = {name: pl.Int32 if name.endswith("_idx") else pl.Categorical for name in columns}
    rows = scan_files(table, [path]).select(pl.col(name).cast(kinds[name]) for name in columns)
    return rows.collect()
