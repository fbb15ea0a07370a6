"""Checks of rows of any writer: within a table, between tables, and against the record.

Frames are `polars.DataFrame`s, as every fit reads them.
"""

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
    """The check that failed, in one line."""


def check_rows(tables: Mapping[str, pl.DataFrame], prompt_ids: Iterable[str]) -> None:
    """All checks of the rows of one segment; a table without rows may be absent.

    Args:
        prompt_ids: those of the segment's record.

    Raises:
        RowError: naming the first check that fails.
    """
    for table, rows in tables.items():
        check_table(table, rows)
    if "rounds" in tables:
        check_prompts(tables["rounds"], prompt_ids)
    if "nodes" in tables:
        check_owners(tables["nodes"], tables.get("rounds", tables["nodes"].clear()))


def check_table(table: str, rows: pl.DataFrame) -> None:
    """Checks of one table: nothing required is null, keys are unique, parents come first.

    Args:
        rows: with the key's columns; other columns that it lacks are not checked.
    """
    import polars as pl

    for column in TABLES[table]:
        if not column.nullable and column.name in rows.columns and rows[column.name].null_count():
            raise RowError(f"null in column {column.name}")
    # Writers put nodes round by round in rising order, which shows at a glance that none is twice.
    last, run = pl.col(KEYS[table][-1]), pl.struct(ROUND_KEY).rle_id()
    is_rising = rows.select((last > last.shift()) | (run > run.shift())).to_series().all()
    if table == "rounds" or not is_rising or _runs(rows).is_duplicated().any():
        counted = rows.lazy().group_by(KEYS[table]).len().filter(pl.col("len") > 1)
        twice = counted.head(1).collect()
        if len(twice):
            raise RowError(f"({', '.join(KEYS[table])}) {twice.row(0)[:-1]} twice")
    if "parent_idx" in rows.columns:
        is_late = (pl.col("parent_idx") >= pl.col("node_idx")) | (pl.col("parent_idx") < -1)
        late = rows.select(*KEYS["nodes"], "parent_idx").filter(is_late)
        if len(late):
            found = late.row(0, named=True)
            raise RowError(f"a parent that does not stand before its node: {found}")


def check_prompts(rounds: pl.DataFrame, prompt_ids: Iterable[str]) -> None:
    """Every round is of a prompt that the record names; a prompt may have no round."""
    found = rounds["prompt_id"].unique().to_list()
    strangers = sorted(set(found).difference(prompt_ids))
    if strangers:
        raise RowError(f"rows of prompt {strangers[0]!r}, which the segment's record does not name")


def check_owners(nodes: pl.DataFrame, rounds: pl.DataFrame) -> None:
    """Every node is of a round of the same segment, and nodes are in the order of the rounds.

    Replay goes along both tables side by side: with another order it would take one round's tree
    for another's of the same size.
    """
    places = rounds.select(ROUND_KEY).with_row_index("place")
    runs = _runs(nodes).join(places, on=ROUND_KEY, how="left", maintain_order="left")
    place = runs["place"]
    if place.null_count():
        found = runs.row(place.is_null().arg_max() or 0)[:-1]
        raise RowError(f"nodes of round {found}, which the segment's rounds do not have")
    is_behind = place <= place.shift()
    if is_behind.any():
        found = runs.row(is_behind.arg_max() or 0)[:-1]
        raise RowError(f"nodes of round {found} behind those of a later one")


def _runs(rows: pl.DataFrame) -> pl.DataFrame:
    """The round of each run of rows of one round."""
    import polars as pl

    rounds = rows.select(pl.struct(ROUND_KEY).rle().struct.field("value"))
    return rounds.unnest("value")


# --------------------------------------------------------------------------- files


def check_keys(name: str, files: Iterable[dict[str, Path]], prompt_ids: Iterable[str]) -> None:
    """Reads the key columns, and those of parents, of every row that counts.

    Raises:
        TraceCorruptError: a key that is null or stands twice, a request in two segments, rows of a
            prompt that no record names, nodes without their round or before their parent, or a
            file that cannot be read.
    """
    import polars as pl

    parts, prompts = [], frozenset(prompt_ids)
    with decoding(name):
        try:
            for paths in files:
                rounds = _key_columns("rounds", paths, *ROUND_KEY, "prompt_id")
                nodes = _key_columns("nodes", paths, *KEYS["nodes"], "parent_idx")
                check_table("rounds", rounds)
                check_table("nodes", nodes)
                check_owners(nodes, rounds)
                parts.append(rounds.select("request_id").unique())
                check_prompts(rounds, prompts)
            requests = pl.concat(parts)["request_id"] if parts else pl.Series(dtype=pl.String)
            twice = requests.filter(requests.is_duplicated())
            if len(twice):
                raise RowError(f"rounds of request {twice[0]!r} in two segments")
        except RowError as error:
            raise broken_rows(name, error) from error


def broken_rows(what: str, error: RowError) -> TraceCorruptError:
    """The refusal of a segment or set whose rows fail a check."""
    return TraceCorruptError(
        f"{what}: expected rows as a writer makes them, found {shown(str(error))}",
        hint=(
            "find the segment with `specctl traces verify`, and collect its prompts again into "
            "a new set"
        ),
    )


def _key_columns(table: str, paths: dict[str, Path], *columns: str) -> pl.DataFrame:
    import polars as pl

    rows = scan_files(table, [paths[table]] if table in paths else [])
    kinds = {name: pl.Int32 if name.endswith("_idx") else pl.Categorical for name in columns}
    return rows.select(pl.col(name).cast(kind) for name, kind in kinds.items()).collect()
