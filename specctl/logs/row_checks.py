"""Checks of rows, whoever wrote them: within a table, between tables, and against the record.

Frames are `polars.DataFrame`s, as every fit reads them. Their keys are compared as numbers: texts
are categories, so a request is a small integer, and `(request_id, round_idx)` one of 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.errors import TraceCorruptError, shown
from specctl.logs.parquet import decoding, scan_files
from specctl.trace import TABLES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
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
    for column in TABLES[table]:
        if not column.nullable and column.name in rows.columns and rows[column.name].null_count():
            raise RowError(f"null in column {column.name}")
    if not _is_unique(table, rows):
        raise RowError(f"{_first_twice(table, rows)} twice")
    if "parent_idx" in rows.columns:
        _check_parents(rows)


def check_prompts(rounds: pl.DataFrame, prompt_ids: Iterable[str]) -> None:
    """Every round is of a prompt that the record names; a prompt may have no round."""
    found = rounds["prompt_id"].unique().to_list()
    strangers = sorted(set(found) - set(prompt_ids))
    if strangers:
        raise RowError(f"rows of prompt {strangers[0]!r}, which the segment's record does not name")


def check_owners(nodes: pl.DataFrame, rounds: pl.DataFrame) -> None:
    """Every node is of a round of the same segment, and nodes are in the order of the rounds.

    Replay goes along both tables side by side: with another order it would take one round's tree
    for another's of the same size.
    """
    import numpy as np

    of_rounds, of_nodes = _packed(rounds, nodes)
    firsts = np.flatnonzero(_begins(of_nodes))
    strangers = firsts[~np.isin(of_nodes[firsts], of_rounds)]
    if len(strangers):
        found = nodes.select(ROUND_KEY).row(int(strangers[0]))
        raise RowError(f"nodes of round {found}, which the segment's rounds do not have")
    order = np.argsort(of_rounds)
    places = order[np.searchsorted(of_rounds, of_nodes[firsts], sorter=order)]
    behind = firsts[1:][np.diff(places) <= 0]
    if len(behind):
        found = nodes.select(ROUND_KEY).row(int(behind[0]))
        raise RowError(f"nodes of round {found} behind those of a later one")


def _is_unique(table: str, rows: pl.DataFrame) -> bool:
    """In two passes where nodes stand round by round in rising order, as writers put them."""
    import numpy as np

    [rounds] = _packed(rows)
    if table == "rounds":
        return bool(len(np.unique(rounds)) == len(rounds))
    begins, node_idx = _begins(rounds), rows["node_idx"].to_numpy()
    is_rising = (begins[1:] | (node_idx[1:] > node_idx[:-1])).all()
    firsts = rounds[begins]
    if is_rising and len(np.unique(firsts)) == len(firsts):
        return True
    return _twice(table, rows).is_empty()


def _twice(table: str, rows: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    counted = rows.lazy().group_by(KEYS[table]).len().filter(pl.col("len") > 1)
    return counted.head(1).collect()


def _first_twice(table: str, rows: pl.DataFrame) -> str:
    return f"({', '.join(KEYS[table])}) {_twice(table, rows).row(0)[:-1]}"


def _check_parents(rows: pl.DataFrame) -> None:
    node_idx, parent_idx = rows["node_idx"].to_numpy(), rows["parent_idx"].to_numpy()
    wrong = (parent_idx >= node_idx) | (parent_idx < -1)
    if wrong.any():
        found = rows[int(wrong.argmax())].select(*KEYS["nodes"], "parent_idx").row(0, named=True)
        raise RowError(f"a parent that does not stand before its node: {found}")


def _packed(*frames: pl.DataFrame) -> list[npt.NDArray[np.int64]]:
    """`(request_id, round_idx)` of each frame, `[R]` int64, comparable between the frames."""
    import numpy as np
    import polars as pl

    # Numbers of categories are promised to agree within one column alone.
    requests = pl.concat([frame["request_id"] for frame in frames]).to_physical().to_numpy()
    rounds = np.concatenate([frame["round_idx"].to_numpy() for frame in frames])
    keys = requests.astype(np.int64) << 32 | rounds.astype(np.int64) & 0xFFFFFFFF
    return np.split(keys, np.cumsum([len(frame) for frame in frames])[:-1])


def _begins(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """`[R]` bool: the key differs from the one before."""
    import numpy as np

    begins = np.ones(len(keys), np.bool_)
    begins[1:] = keys[1:] != keys[:-1]
    return begins


# --------------------------------------------------------------------------- files


def check_keys(name: str, files: Iterable[dict[str, Path]], prompt_ids: Iterable[str]) -> None:
    """Reads the key columns, and those of parents, of every row that counts.

    Rounds are checked all together. Nodes are not: their rounds stand in the same segment, so a key
    that is unique there is unique in the set.

    Raises:
        TraceCorruptError: a key that is null or stands twice, rows of a prompt that no record
            names, nodes without their round or before their parent, or a file that cannot be read.
    """
    import polars as pl

    parts = []
    with decoding(name):
        try:
            for paths in files:
                rounds = _key_columns("rounds", paths, (*ROUND_KEY, "prompt_id"))
                nodes = _key_columns("nodes", paths, (*KEYS["nodes"], "parent_idx"))
                check_table("nodes", nodes)
                check_owners(nodes, rounds)
                parts.append(rounds)
            if parts:
                together = pl.concat(parts)
                check_table("rounds", together)
                check_prompts(together, prompt_ids)
        except RowError as error:
            raise broken_rows(name, error) from error


def broken_rows(what: str, error: RowError) -> TraceCorruptError:
    """The refusal of a segment or set whose rows fail a check."""
    return TraceCorruptError(
        what,
        expected="rows as a writer makes them",
        found=shown(str(error)),
        fix="find the segment with `specctl traces verify`, and collect its prompts again into a "
        "new set",
    )


def _key_columns(table: str, paths: dict[str, Path], columns: Sequence[str]) -> pl.DataFrame:
    import polars as pl

    rows = scan_files(table, [paths[table]] if table in paths else [])
    kinds = {name: pl.Int32 if name.endswith("_idx") else pl.Categorical for name in columns}
    return rows.select(pl.col(name).cast(kind) for name, kind in kinds.items()).collect()
