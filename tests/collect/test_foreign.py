"""Files of strangers: refused by name, whatever they do to the process that reads them."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.collect import foreign
from specctl.collect.commits import Segment
from specctl.collect.foreign import inspect_files, refusals
from specctl.collect.inspection import RefusedError, inspect
from specctl.errors import TraceCorruptError
from specctl.trace import arrow_schema
from tests.collect.test_reader import collect, segments

NUM_INFLATED = 1 << 19


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    return segments(collect(tmp_path / "traces", "a"))[1]


@pytest.fixture
def path(tmp_path: Path, segment: Segment) -> Path:
    return segment.path(tmp_path / "traces")


def widen_footer(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8] + struct.pack("<I", 1 << 30) + b"PAR1")


def add_column(path: Path) -> None:
    rows = pq.ParquetFile(path).read(use_threads=False)
    pq.write_table(rows.append_column("more", pa.nulls(len(rows), pa.int8())), path)


def change_type(path: Path) -> None:
    rows = pq.ParquetFile(path).read(use_threads=False)
    index = rows.schema.get_field_index("batch_size")
    pq.write_table(rows.set_column(index, "batch_size", rows["batch_size"].cast("int64")), path)


def inflate(path: Path) -> None:
    """Half a million equal rows in a few hundred bytes: pages as large as no writer makes them."""
    schema = arrow_schema("rounds")
    kinds = [pa.string() if pa.types.is_dictionary(kind) else kind for kind in schema.types]
    columns = [pa.repeat(pa.scalar("1").cast(kind), NUM_INFLATED) for kind in kinds]
    rows = pa.Table.from_arrays(columns, names=schema.names)
    pages = {"data_page_size": 1 << 26, "write_batch_size": 1 << 22, "max_rows_per_page": 1 << 30}
    pq.write_table(rows, path, compression="zstd", use_dictionary=False, **pages)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "no Parquet footer"),
    "text": (lambda path: path.write_bytes(b"x" * 100), "no Parquet footer"),
    "footer": (widen_footer, "a footer of 1073741824 bytes"),
    "column": (add_column, "columns other than those"),
    "type": (change_type, "batch_size"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_unsound_files_are_refused(name: str, path: Path, segment: Segment) -> None:
    inspect(path, segment.table, segment.num_rows)
    damage, reason = DAMAGE[name]
    damage(path)
    with pytest.raises(RefusedError, match=reason):
        inspect(path, segment.table, segment.num_rows)


def test_rows_that_the_record_does_not_have_are_refused(path: Path, segment: Segment) -> None:
    with pytest.raises(RefusedError, match="a footer of 2 rows instead of 3"):
        inspect(path, segment.table, 3)


def test_what_unpacks_to_far_more_is_refused_unread(path: Path) -> None:
    inflate(path)
    with pytest.raises(RefusedError, match="bytes that unpack to"):
        inspect(path, "rounds", NUM_INFLATED)


def test_child_names_the_file_and_goes_on(path: Path, segment: Segment, tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(path.read_bytes()[:-20])
    files = [(path, segment, "first"), (bad, segment, "second"), (path, segment, "third")]
    [(_, name, reason)] = refusals(files)
    assert name == "second"
    assert reason
    with pytest.raises(TraceCorruptError, match="second: expected a Parquet file"):
        inspect_files(files)
    inspect_files(files[::2])


def test_a_reader_that_dies_costs_its_file_alone(
    path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is killed by the second file of three, as by a fault in native code."""
    dying = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from specctl.collect import inspection as i\nreal = i.inspect\n"
        "def inspect(path, *rest):\n"
        "    if path.name == 'deadly': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    real(path, *rest)\n"
        "i.inspect = inspect\ni.main()"
    )
    deadly = path.with_name("deadly")
    os.link(path, deadly)
    command = foreign.COMMAND
    monkeypatch.setattr(foreign, "COMMAND", [command[0], "-c", dying.replace("\\\n", "\n")])
    found = refusals([(path, segment, "1"), (deadly, segment, "2"), (path, segment, "3")])
    assert [(name, reason) for _, name, reason in found] == [
        ("2", f"one that its reader died of (status {-signal.SIGSEGV})")
    ]
