"""Rows under honest digests that no writer makes: verify names them, and nobody reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.collect import keys, reader
from specctl.collect.compacting import compact
from specctl.collect.files import segment_path
from specctl.collect.foreign import files_of, refusals
from specctl.collect.inspection import Question, inspect
from specctl.collect.logs import read_commits
from specctl.collect.merging import merge
from specctl.collect.reader import TraceSet
from specctl.collect.row_laws import RowError, check_rows, check_table
from specctl.collect.store import TraceWriter
from specctl.collect.tables import read_tables
from specctl.collect.verifying import verify
from specctl.errors import TraceCorruptError
from specctl.trace import TABLES
from tests.cli.command import passes, refuses, specctl
from tests.collect.inspections import break_order
from tests.collect.rounds import header
from tests.collect.sets import collect
from tests.collect.small_rows import tables_of
from tests.collect.small_sets import again, replaced

Tables = dict[str, Any]


def double(tables: Tables, table: str) -> Tables:
    return {**tables, table: pa.concat_tables([tables[table]] * 2)}


def with_column(tables: Tables, table: str, name: str, values: list[int]) -> Tables:
    rows = tables[table]
    index = rows.schema.get_field_index(name)
    field = rows.schema.field(index)
    return {**tables, table: rows.set_column(index, field, pa.array(values, field.type))}


def without_rounds(tables: Tables) -> Tables:
    return {"nodes": tables["nodes"]}


LAWS: dict[str, tuple[Callable[[Tables], Tables], str]] = {
    "rounds twice": (
        lambda made: double(made, "rounds"),
        r"\(request_id, round_idx\) \('a/0', \d\) twice",
    ),
    "nodes twice": (
        lambda made: double(made, "nodes"),
        r"\(request_id, round_idx, node_idx\) \('a/0', \d, \d+\) twice",
    ),
    "parent behind": (
        lambda made: with_column(made, "nodes", "parent_idx", [10**9] * 44),
        "does not stand before its node.*'parent_idx': 1000000000",
    ),
    "parent of itself": (
        lambda made: with_column(
            made, "nodes", "parent_idx", made["nodes"]["node_idx"].to_pylist()
        ),
        "does not stand before its node",
    ),
    "another prompt": (lambda _: tables_of(["a", "b"]), "of prompt 'b', which the commit record"),
    "another order": (
        lambda made: {**made, "nodes": made["nodes"].take([*range(22, 44), *range(22)])},
        r"nodes of round \('a/0', 0\) behind those of a later one",
    ),
    "nodes of none": (without_rounds, r"nodes of round \('a/0', 0\)"),
    "nodes of another": (
        lambda made: {**made, "nodes": tables_of(["a", "b"])["nodes"]},
        r"nodes of round \('b/0', 0\)",
    ),
}


@pytest.fixture(params=LAWS)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A set whose second commit breaks a law, and how that is told."""
    change, reason = LAWS[request.param]
    with TraceWriter.open(tmp_path / "set", header()) as writer:
        writer.commit(["z"], tables_of(["z"]))
        writer.commit(["a"], change(tables_of(["a"])))
    return tmp_path / "set", reason


def test_broken_laws_are_damage(broken: tuple[Path, str], tmp_path: Path) -> None:
    root, reason = broken
    [damage] = verify(root).damages
    commit = read_commits(root).commits[-1]
    assert damage.commit == commit.digest
    for act in (
        lambda: TraceSet.open(root),
        lambda: merge([str(root)], str(tmp_path / "merged")),
        lambda: compact(root),
    ):
        with pytest.raises(TraceCorruptError, match=reason):
            act()
    assert len(read_commits(root).commits) == 2
    assert not (tmp_path / "merged").exists()
    assert specctl("traces", "snapshot", root).code == 4
    assert not list(root.glob("snapshots/*"))
    assert specctl("traces", "snapshot", root, "--without", commit.digest).code == 0


def test_one_key_in_two_commits_is_damage_to_all(tmp_path: Path) -> None:
    """Each of the two files is sound, and so is its record."""
    root = tmp_path / "set"
    with TraceWriter.open(root, header()) as writer:
        writer.commit(["z"], tables_of(["z"]))
        first = writer.commit(["a"], tables_of(["a"]))
        second = writer.commit(["b"], of_prompt(tables_of(["a"]), "b"))
    [damage] = verify(root).damages
    assert damage.reason == f"rounds of request 'a/0' in {first.key} and {second.key}"
    with pytest.raises(TraceCorruptError, match="twice"):
        TraceSet.open(root)
    taken = json.loads(passes("traces", "snapshot", root, "--without", second.digest, "--json").out)
    assert verify(taken["reference"]).is_whole


def test_a_prompt_in_two_commits_is_told_once(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with TraceWriter.open(root, header()) as writer:
        writer.commit(["a"], tables_of(["a"]))
    again(root, "a")
    assert [damage.what for damage in verify(root).damages] == ["prompt 'a'"]
    compact(root)
    assert verify(root).is_whole, "what was superseded holds the same keys"


def of_prompt(tables: Tables, prompt: str) -> Tables:
    """The same requests under another prompt."""
    rows = tables["rounds"]
    index = rows.schema.get_field_index("prompt_id")
    names = pa.array([prompt] * len(rows)).dictionary_encode()
    return {**tables, "rounds": rows.set_column(index, rows.schema.field(index), names)}


def test_sound_rows_pass_in_any_order() -> None:
    made = tables_of(["b", "a"])
    frames = {name: pl.DataFrame(rows) for name, rows in made.items()}
    check_rows(frames, ["a", "b", "c"])
    for name, rows in frames.items():
        check_table(name, rows.sample(fraction=1.0, shuffle=True, seed=0))
    check_rows({"rounds": frames["rounds"]}, ["a", "b"])
    check_rows({}, ["a"])


@pytest.mark.parametrize(
    ("table", "column"),
    [(table, one.name) for table, columns in TABLES.items() for one in columns if not one.nullable],
)
def test_what_is_required_is_never_null(table: str, column: str) -> None:
    rows = pl.DataFrame(tables_of(["a"])[table])
    gone = rows.with_columns(pl.when(pl.int_range(pl.len()) > 0).then(column).alias(column))
    with pytest.raises(RowError, match=f"null in column {column}"):
        check_table(table, gone)


def test_a_file_with_nulls_is_refused(tmp_path: Path) -> None:
    """Parquet files say for themselves which columns may be null."""
    rows = tables_of(["a"])["nodes"]
    index = rows.schema.get_field_index("parent_idx")
    loose = pa.schema(field.with_nullable(True) for field in rows.schema)
    rows = rows.cast(loose).set_column(index, loose.field(index), pa.nulls(len(rows), pa.int32()))
    pq.write_table(rows, tmp_path / "nodes")
    with pytest.raises(RowError, match="null in column parent_idx"):
        inspect(Question(tmp_path / "nodes", "nodes", len(rows)))


def test_keys_of_categories_far_apart_are_compared_as_texts() -> None:
    """Frames read one by one number their categories as they like."""
    first = pl.DataFrame(tables_of(["x", "y"])["rounds"])
    nodes = pl.DataFrame(tables_of(["y"])["nodes"])
    check_rows({"rounds": first, "nodes": nodes}, ["x", "y"])
    with pytest.raises(RowError, match="nodes of round"):
        check_rows({"rounds": first.filter(pl.col("prompt_id") == "x"), "nodes": nodes}, ["x"])


def test_refused_rounds_leave_their_nodes_to_be_judged_alone(tmp_path: Path) -> None:
    """Nobody opens a refused file again; what it held is not known, so nothing is said of it."""
    with TraceWriter.open(tmp_path / "set", header()) as writer:
        writer.commit(["a"], double(tables_of(["a"]), "rounds"))
    log = read_commits(tmp_path / "set")
    [commit] = log.commits
    paths = {segment.key: segment_path(log.place, segment) for segment in commit.files}
    files = files_of(log.place, commit, paths)
    assert [file.segment.table for file in files] == ["rounds", "nodes"]
    assert [segment.table for segment, *_ in refusals(files)] == ["rounds"]
    alone = {key: path for key, path in paths.items() if "nodes" in key}
    [nodes] = files_of(log.place, commit, alone)
    assert (nodes.commit, nodes.rounds) == (None, None)
    assert refusals([nodes]) == []


def test_keys_are_checked_in_batches_of_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "BATCH_ROWS", 1)
    with TraceWriter.open(tmp_path / "set", header()) as writer:
        for prompt in "abc":
            writer.commit([prompt], tables_of([prompt]))
    log = read_commits(tmp_path / "set")
    assert [len(files["nodes"]) for files in keys._paths(log)] == [1, 1, 1]
    assert TraceSet.open(tmp_path / "set").num_rows("rounds") == 6
    with TraceWriter.open(tmp_path / "set", header(), resume=True) as writer:
        writer.commit(["d"], double(tables_of(["d"]), "nodes"))
    with pytest.raises(TraceCorruptError, match="twice"):
        TraceSet.open(tmp_path / "set")


def test_rows_of_a_commit_are_checked_where_they_are_read(tmp_path: Path) -> None:
    """A bucket's copies are judged alone, as any commit may name them: so rows are, once read."""
    with TraceWriter.open(tmp_path / "set", header()) as writer:
        writer.commit(["a"], tables_of(["a", "b"]))
    log = read_commits(tmp_path / "set")
    with pytest.raises(TraceCorruptError, match="rows of prompt 'b'"):
        read_tables(log.place, log.commits[0])


def test_what_polars_alone_refuses_is_damage(tmp_path: Path) -> None:
    root = collect(tmp_path / "set", "a")
    replaced(root, "nodes", break_order)
    [damage] = verify(root).damages
    assert "ColumnOrder" in damage.reason
    assert "ColumnOrder" in refuses(4, "traces", "merge", root, "-o", tmp_path / "merged")
    assert "ColumnOrder" in refuses(4, "traces", "export", root, "-o", tmp_path / "out")
    assert "ColumnOrder" in refuses(4, "fit", "cart", root, "-o", tmp_path / "fit")


def test_what_decodes_badly_far_behind_the_keys_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit reads lazily; an export asks a child whose fault the error was."""
    root = collect(tmp_path / "set", "a")
    replaced(root, "rounds", break_order)
    monkeypatch.setattr(reader, "check_keys", lambda _: None)
    assert "that can be read" in refuses(4, "traces", "export", root, "-o", tmp_path / "out")
    assert "trace files: expected Parquet" in refuses(4, "show", root)
