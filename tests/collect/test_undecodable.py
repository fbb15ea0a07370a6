"""Files whose digests are right and that no library can decode: whoever reads them refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.collect.domain import domain_of
from specctl.collect.logs import read_commits
from specctl.collect.reader import TraceSet
from specctl.collect.tables import read_tables
from specctl.errors import TraceCorruptError
from specctl.logs.round_table import read_round_table
from specctl.logs.tree_log import DenseLog, LiveLog
from specctl.parquet import collected, read_batches, read_columns
from specctl.replay import serving
from specctl.replay.tune import prepare
from specctl.train.rounds import CartConfig, select_rounds
from tests.cli.command import refuses
from tests.collect.small_sets import collect, replaced
from tests.replay.logs import random_traces

KEYS = {"request_id", "round_idx", "node_idx", "parent_idx", "prompt_id"}
"""What `TraceSet.open` decodes itself."""


def spoil(path: Path) -> None:
    """The last bytes of every column but the keys are others."""
    content = bytearray(path.read_bytes())
    footer = pq.read_metadata(path)
    for group in range(footer.num_row_groups):
        for index in range(footer.num_columns):
            chunk = footer.row_group(group).column(index)
            if chunk.path_in_schema in KEYS:
                continue
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            end = start + chunk.total_compressed_size
            content[end - 12 : end] = bytes(255 - byte for byte in content[end - 12 : end])
    path.write_bytes(content)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return random_traces(tmp_path_factory.mktemp("whole") / "set")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undecodable") / "set"
    random_traces(root)
    for table in ("rounds", "nodes"):
        replaced(root, table, spoil)
    return root


READERS: dict[str, Callable[[TraceSet, TraceSet], Any]] = {
    "replay": lambda traces, _: list(DenseLog.open(traces).chunks()),
    "live log": lambda traces, _: LiveLog.open(traces).support,
    "report, rounds": lambda traces, _: read_round_table(traces),
    "fit": lambda traces, _: select_rounds(traces.scan("rounds"), CartConfig()),
    "tune": lambda traces, _: prepare._contexts(traces),
    "ladder": lambda traces, _: serving._mean_context(traces),
    "summary": lambda traces, _: traces.summary(),
    "domain": lambda traces, _: domain_of(traces),
    "compaction": lambda traces, _: read_tables(traces.logs[0].place, traces.logs[0].commits[0]),
    "Python": lambda traces, _: collected(traces.scan("nodes")),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses(root: Path, whole: TraceSet, reader: str) -> None:
    with pytest.raises(TraceCorruptError, match="`specctl traces verify` names the file"):
        READERS[reader](TraceSet.open(root), whole)


def test_verbs_refuse_in_one_line(root: Path, tmp_path: Path) -> None:
    assert "decompress" in refuses(4, "replay", root, "-p", "chain")
    assert "zstd error" in refuses(4, "show", root)
    assert "decompress" in refuses(4, "fit", "cart", root, "-o", tmp_path / "fit")


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    """pyarrow reads the columns that there are, and says nothing of others."""
    root = tmp_path / "set"
    random_traces(root)

    def drop(path: Path) -> None:
        rows = pq.ParquetFile(path).read()
        pq.write_table(rows.drop_columns(["draft_logp"]), path)

    replaced(root, "nodes", drop)
    traces = TraceSet.open(root)
    with pytest.raises(TraceCorruptError, match="no column draft_logp"):
        list(DenseLog.open(traces).chunks())
    [commit] = read_commits(root).commits
    with pytest.raises(TraceCorruptError, match="no column draft_logp"):
        read_tables(traces.logs[0].place, commit)
    with pytest.raises(TraceCorruptError, match="draft_logp"):
        collected(traces.scan("nodes").select("draft_logp"))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nodes.parquet"
    for read in (lambda: read_columns(path, ["a"]), lambda: list(read_batches(path, ["a"], 1))):
        with pytest.raises(TraceCorruptError, match=r"nodes.parquet.*No such file"):
            read()


def test_too_little_memory_is_no_files_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", starve)
    with pytest.raises(MemoryError):
        compact_read(root)


def test_columns_of_plain_text_are_compacted_as_they_are_read(tmp_path: Path) -> None:
    """Of the type that a hand-made file has; digests are right, and readers take it."""
    collect(tmp_path / "set", "a")

    def plain(path: Path) -> None:
        rows = pq.read_table(path)
        kinds = [
            f.with_type(pa.string()) if pa.types.is_dictionary(f.type) else f for f in rows.schema
        ]
        pq.write_table(rows.cast(pa.schema(kinds)), path)

    replaced(tmp_path / "set", "rounds", plain)
    assert TraceSet.open(tmp_path / "set").prompt_ids == ("a",)
    compact_read(tmp_path / "set")


def compact_read(root: Path) -> None:
    log = read_commits(root)
    read_tables(log.place, log.commits[0])


def test_nulls_that_no_writer_makes_hold_up_a_compaction_in_words(tmp_path: Path) -> None:
    root = tmp_path / "set"
    random_traces(root)

    def empty(path: Path) -> None:
        rows = pq.ParquetFile(path).read()
        index = rows.schema.get_field_index("num_accepted")
        field = rows.schema.field(index).with_nullable(True)
        pq.write_table(rows.set_column(index, field, pa.nulls(len(rows), pa.int32())), path)

    replaced(root, "rounds", empty)
    with pytest.raises(TraceCorruptError, match="null in column num_accepted"):
        compact_read(root)
