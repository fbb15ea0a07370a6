"""Rows and files under honest digests that no writer makes: every reader refuses them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.collect.trace_writer import TraceWriter
from specctl.collect.verifying import check_segment, verify
from specctl.errors import TraceCorruptError, memory_error_of
from specctl.logs.parquet import collected, read_columns
from specctl.logs.row_checks import RowError, check_rows, check_table
from specctl.logs.trace_set import TraceSet, domain_of, read_listing
from specctl.logs.tree_log import DenseLog
from specctl.trace import TABLES
from tests.cli.command import specctl
from tests.collect.rounds import header
from tests.collect.sets import replaced, tables_of
from tests.replay.logs import random_traces

Tables = dict[str, Any]


def double(made: Tables, table: str) -> Tables:
    return {**made, table: pa.concat_tables([made[table]] * 2)}


def with_column(made: Tables, table: str, name: str, values: list[int]) -> Tables:
    rows = made[table]
    index = rows.schema.get_field_index(name)
    field = rows.schema.field(index)
    return {**made, table: rows.set_column(index, field, pa.array(values, field.type))}


def parents(made: Tables, values: list[int]) -> Tables:
    return with_column(made, "nodes", "parent_idx", values)


KEY = r"\(request_id, round_idx"
BROKEN: dict[str, tuple[Callable[[Tables], Tables], str]] = {
    "rounds twice": (lambda made: double(made, "rounds"), rf"{KEY}\) \('a/0', \d\) stands twice"),
    "nodes twice": (
        lambda made: double(made, "nodes"), rf"{KEY}, node_idx\) \('a/0', \d, \d+\) stands twice"
    ),
    "parent behind": (
        lambda made: parents(made, [10**9] * 44),
        "does not stand before its node.*'parent_idx': 1000000000",
    ),
    "parent of itself": (
        lambda made: parents(made, made["nodes"]["node_idx"].to_pylist()),
        "does not stand before its node",
    ),
    "another prompt": (lambda _: tables_of(["a", "b"]), "does not name prompt 'b'"),
    "another order": (
        lambda made: {**made, "nodes": made["nodes"].take([*range(22, 44), *range(22)])},
        r"nodes of round \('a/0', 0\) stand behind those of a later one",
    ),
    "nodes of none": (lambda made: {"nodes": made["nodes"]}, r"nodes of round \('a/0', 0\)"),
    "nodes of another": (
        lambda made: {**made, "nodes": tables_of(["a", "b"])["nodes"]},
        r"nodes of round \('b/0', 0\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_are_damage(tmp_path: Path, name: str) -> None:
    change, reason = BROKEN[name]
    root = tmp_path / "set"
    with TraceWriter.open(root, header()) as writer:
        writer.commit(["z"], tables_of(["z"]))
        broken = writer.commit(["a"], change(tables_of(["a"])))
    assert broken.key in [damage.what for damage in verify(root).damages]
    with pytest.raises(TraceCorruptError, match=reason):
        TraceSet.open(root)
    with pytest.raises(TraceCorruptError, match=reason):
        check_segment(read_listing(root), broken)


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
def test_required_columns_are_never_null(table: str, column: str) -> None:
    rows = pl.DataFrame(tables_of(["a"])[table])
    gone = rows.with_columns(pl.when(pl.int_range(pl.len()) > 0).then(column).alias(column))
    with pytest.raises(RowError, match=f"null stands in column {column}"):
        check_table(table, gone)


def test_keys_of_categories_far_apart_are_compared_as_texts() -> None:
    """Frames read one by one number their categories as they like."""
    first = pl.DataFrame(tables_of(["x", "y"])["rounds"])
    nodes = pl.DataFrame(tables_of(["y"])["nodes"])
    check_rows({"rounds": first, "nodes": nodes}, ["x", "y"])
    with pytest.raises(RowError, match="nodes of round"):
        check_rows({"rounds": first.filter(pl.col("prompt_id") == "x"), "nodes": nodes}, ["x"])


# --------------------------------------------------------------------------- undecodable files

KEYS = {"request_id", "round_idx", "node_idx", "parent_idx", "prompt_id"}
"""Columns that `TraceSet.open` decodes itself."""


def spoil(path: Path) -> None:
    """The last bytes of every column but the keys are others."""
    content, footer = bytearray(path.read_bytes()), pq.read_metadata(path)
    for group in range(footer.num_row_groups):
        for index in range(footer.num_columns):
            chunk = footer.row_group(group).column(index)
            if chunk.path_in_schema not in KEYS:
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                end = start + chunk.total_compressed_size
                content[end - 12 : end] = bytes(255 - byte for byte in content[end - 12 : end])
    path.write_bytes(content)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undecodable") / "set"
    random_traces(root)
    for table in reversed(TABLES):  # a record is written anew with the rounds
        replaced(root, table, spoil)
    return root


def read_whole(root: Path) -> None:
    listing = read_listing(root)
    check_segment(listing, listing.segments[0])


READERS: dict[str, Callable[[Path], Any]] = {
    "chunks of a log": lambda root: list(DenseLog.open(TraceSet.open(root)).chunks()),
    "summary": lambda root: TraceSet.open(root).summary(),
    "domain": lambda root: domain_of(TraceSet.open(root)),
    "verifying": read_whole,
    "Python": lambda root: collected(TraceSet.open(root).scan("nodes")),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses(spoiled: Path, reader: str) -> None:
    with pytest.raises(TraceCorruptError, match="`specctl traces verify` names the file"):
        READERS[reader](spoiled)


def test_a_file_without_a_column_or_with_nulls_in_it_is_refused(tmp_path: Path) -> None:
    """pyarrow reads the columns that there are, and nulls where the file says that they may be."""
    root, other = tmp_path / "set", tmp_path / "nulls"
    for made in (root, other):
        random_traces(made)

    def empty(path: Path) -> None:
        rows = pq.ParquetFile(path).read()
        field = rows.schema.field("num_accepted").with_nullable(True)
        index = rows.schema.get_field_index("num_accepted")
        pq.write_table(rows.set_column(index, field, pa.nulls(len(rows), pa.int32())), path)

    replaced(other, "rounds", empty)
    with pytest.raises(TraceCorruptError, match="num_accepted"):
        read_whole(other)

    def drop(path: Path) -> None:
        pq.write_table(pq.ParquetFile(path).read().drop_columns(["draft_logp"]), path)

    replaced(root, "nodes", drop)
    with pytest.raises(TraceCorruptError, match="no column draft_logp"):
        list(DenseLog.open(TraceSet.open(root)).chunks())


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nodes.parquet"
    with pytest.raises(TraceCorruptError, match=r"nodes.parquet.*no such file"):
        read_columns(path, ["a"])


STARVED = (
    MemoryError(),
    pa.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unava"),
    pa.ArrowException("Unknown error: std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("can't start new thread"),
)
"""As the libraries said it under `ulimit -d`."""


@pytest.mark.parametrize("starved", STARVED, ids=lambda error: type(error).__name__)
def test_memory_errors_of_all_libraries_are_known(starved: Exception) -> None:
    assert memory_error_of(starved) is not None


@pytest.mark.parametrize(
    "place", ["pyarrow.parquet.ParquetFile", "specctl.replay.run.sums_to_score"]
)
def test_too_little_memory_is_no_files_fault(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files are read, and wherever else: one line, with what to do."""
    random_traces(tmp_path / "traces", num_prompts=2, depth=2, top_k=2)

    def starve(*_: object, **__: object) -> None:
        raise STARVED[2]  # of a type that means damage

    monkeypatch.setattr(place, starve)
    ended = specctl("replay", tmp_path / "traces", "-p", "chain", "--json")
    assert (ended.code, ended.err.count("\n")) == (10, 1)
    assert ended.err.startswith("error: out of memory (docs/replay.md, Large sets)")
    assert "lower --threads" in ended.err
