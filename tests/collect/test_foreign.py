"""Files of strangers: refused by name, whatever they do to the process that reads them."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.collect import foreign, inspection
from specctl.collect.commits import Segment
from specctl.collect.foreign import InspectionError, inspect_files, refusals
from specctl.collect.inspection import Question, RefusedError, inspect
from specctl.collect.store import TraceWriter
from specctl.collect.verifying import verify
from specctl.errors import TraceCorruptError
from specctl.trace import arrow_schema
from tests.collect.inspections import all_ok, break_order
from tests.collect.rounds import header
from tests.collect.sets import collect, segments
from tests.collect.small_rows import tables_of

NUM_INFLATED = 1 << 19
LOWER = "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))"


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


def break_text(path: Path) -> None:
    """A dictionary that is no UTF-8, under checksums that nobody wrote."""
    content = path.read_bytes()
    schema = pq.read_schema(path)
    rows = pq.ParquetFile(path).read(use_threads=False)
    index = schema.get_field_index("category")
    broken = pa.DictionaryArray.from_arrays(
        pa.array([0] * len(rows), pa.int32()), pa.array([b"\xff\xfe"]).view(pa.string())
    )
    pq.write_table(rows.set_column(index, schema.field(index), broken), path)
    assert path.read_bytes() != content


def forget_rows(path: Path) -> None:
    """The footer's count of rows, raised by one; its row groups know better."""
    content = path.read_bytes()
    footer = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    place = content.index(b"\x16\x04\x19", footer)  # num_rows 2, then the list of groups
    path.write_bytes(content[:place] + b"\x16\x06" + content[place + 2 :])


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
    inspect(Question(path, segment.table, segment.num_rows))
    damage, reason = DAMAGE[name]
    damage(path)
    with pytest.raises(RefusedError, match=reason):
        inspect(Question(path, segment.table, segment.num_rows))


@pytest.mark.parametrize(
    ("damage", "num_rows", "error", "reason"),
    [
        (break_text, 2, pa.ArrowInvalid, "Invalid UTF8"),
        (forget_rows, 3, RefusedError, "2 rows instead of 3"),
        (break_order, 2, pl.exceptions.ComputeError, "ColumnOrder"),
    ],
)
def test_what_only_reading_shows_is_refused_by_who_sees_it(
    damage: Callable[[Path], None],
    num_rows: int,
    error: type[Exception],
    reason: str,
    path: Path,
) -> None:
    """Validation, the count of what was read, and polars, which reads it afterwards."""
    damage(path)
    with pytest.raises(error, match=reason):
        inspect(Question(path, "rounds", num_rows))


def test_a_row_group_is_no_larger_than_memory(
    path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "MAX_GROUP_BYTES", 100)
    with pytest.raises(RefusedError, match="a row group of"):
        inspect(Question(path, segment.table, segment.num_rows))


def test_rows_that_the_record_does_not_have_are_refused(path: Path, segment: Segment) -> None:
    with pytest.raises(RefusedError, match="a footer of 2 rows instead of 3"):
        inspect(Question(path, segment.table, 3))


def test_what_unpacks_to_far_more_is_refused_unread(path: Path) -> None:
    inflate(path)
    with pytest.raises(RefusedError, match="bytes that unpack to"):
        inspect(Question(path, "rounds", NUM_INFLATED))


def test_runs_of_one_value_expand_no_further_than_a_writer_would(path: Path) -> None:
    """Indices of a dictionary in one run: nothing to unpack, and twelve rows a byte in memory."""
    schema, num_rows = arrow_schema("rounds"), 2 << 20
    zeros = pa.repeat(pa.scalar(0, pa.int32()), num_rows)
    columns = [
        pa.DictionaryArray.from_arrays(zeros, ["p"])
        if pa.types.is_dictionary(kind)
        else pa.repeat(pa.scalar(1).cast(kind), num_rows)
        for kind in schema.types
    ]
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), path, compression="zstd")
    with pytest.raises(RefusedError, match=f"{num_rows} rows in {path.stat().st_size} bytes"):
        inspect(Question(path, "rounds", num_rows))


def named(path: Path, text: str, num_rows: int) -> None:
    """Rows of a category of that name."""
    rows = pq.ParquetFile(path).read(use_threads=False).slice(0, 1)
    rows = rows.take(pa.array([0] * num_rows))
    index = rows.schema.get_field_index("category")
    zeros = pa.array([0] * num_rows, pa.int32())
    rows = rows.set_column(
        index, rows.schema.field(index), pa.DictionaryArray.from_arrays(zeros, [text])
    )
    step = rows.schema.get_field_index("round_idx")
    rows = rows.set_column(
        step, rows.schema.field(step), pa.array([i % 100 for i in range(num_rows)], pa.int32())
    )
    pq.write_table(rows, path, compression="zstd")


def test_texts_are_names_and_not_bombs(path: Path) -> None:
    named(path, "x" * 1024, 100)
    inspect(Question(path, "rounds", 100))
    named(path, "x" * 1025, 100)
    with pytest.raises(RefusedError, match="a text of 1025 bytes"):
        inspect(Question(path, "rounds", 100))
    named(path, "x" * 1024, 100_000)
    with pytest.raises(RefusedError, match="far larger than the file when written out"):
        inspect(Question(path, "rounds", 100_000))


def test_child_names_the_file_and_goes_on(path: Path, segment: Segment, tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(path.read_bytes()[:-20])
    files = [
        foreign.File(path, segment, "first"),
        foreign.File(bad, segment, "second"),
        foreign.File(path, segment, "third"),
    ]
    [(_, name, reason)] = refusals(files)
    assert name == "second"
    assert reason
    with pytest.raises(TraceCorruptError, match="second: expected a Parquet file"):
        inspect_files(files)
    inspect_files(files[::2])


CHILD = """
import os, resource, signal, sys
sys.path[:] = {path!r}
from pathlib import Path
from specctl.collect import inspection
real, seen = inspection.inspect, []
def inspect(asked):
    path = asked.path
    seen.append(path.name)
    {behaves}
    real(asked)
inspection.inspect = inspect
{before}
inspection.main()
"""


def child(monkeypatch: pytest.MonkeyPatch, behaves: str = "pass", before: str = "pass") -> None:
    """Lets the child do something before each file, or before it starts."""
    code = CHILD.format(path=sys.path, behaves=behaves, before=before)
    monkeypatch.setattr(foreign, "command", lambda: [sys.executable, "-I", "-c", code])


@pytest.fixture
def files(path: Path, segment: Segment) -> list[foreign.File]:
    """Three files that are sound; something happens to the reader of the second."""
    deadly = path.with_name("deadly")
    os.link(path, deadly)
    return [
        foreign.File(path, segment, "1"),
        foreign.File(deadly, segment, "2"),
        foreign.File(path, segment, "3"),
    ]


def test_a_reader_that_dies_costs_its_file_alone(
    files: list[foreign.File], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is killed by the second file of three, as by a fault in native code."""
    child(monkeypatch, "if path.name == 'deadly': os.kill(os.getpid(), signal.SIGSEGV)")
    assert [(name, reason) for _, name, reason in refusals(files)] == [
        ("2", "one that its reader died of (killed by SIGSEGV)")
    ]


def test_a_reader_that_dies_of_what_it_read_before_costs_nothing(
    files: list[foreign.File], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is believed to be deadly only where a fresh child dies of it too."""
    child(monkeypatch, "if len(seen) == 2: os.kill(os.getpid(), signal.SIGSEGV)")
    assert refusals(files) == []
    child(monkeypatch, "if len(seen) == 2: raise MemoryError")
    assert refusals(files) == []


def test_time_is_counted_by_file(
    files: list[foreign.File], monkeypatch: pytest.MonkeyPatch
) -> None:
    burn = "while inspection.time.process_time() < 0.4 + 0.5 * len(seen): pass"
    child(monkeypatch, burn, "inspection.MAX_CPU_S = 1")
    runs, real = [], foreign._run
    monkeypatch.setattr(foreign, "_run", lambda files: runs.append(files) or real(files))
    assert refusals(files[:2]) == []
    assert len(runs) == 1  # nobody died and was tried again
    endless = "while inspection.time.process_time() < 30: pass"
    child(monkeypatch, endless, "inspection.MAX_CPU_S = 0")
    [(_, name, reason)] = refusals(files[:1])
    assert (name, reason) == ("1", "one that its reader died of (killed by SIGXCPU)")


@pytest.mark.parametrize(
    ("behaves", "before", "says"),
    [
        ("pass", "raise ImportError('no such lib')", "inspection of trace files.*no such lib"),
        (
            "pass",
            "resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))",
            "inspection of trace files.*ended .status 1.: ",
        ),
        ("raise MemoryError", LOWER, "inspection of 1: .*MemoryError"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "pass", "inspection of 1: .*killed by SIGKILL"),
    ],
)
def test_what_the_machine_does_is_no_fault_of_a_file(
    files: list[foreign.File],
    monkeypatch: pytest.MonkeyPatch,
    behaves: str,
    before: str,
    says: str,
) -> None:
    child(monkeypatch, behaves, before)
    with pytest.raises(InspectionError, match=says):
        refusals(files)


def test_native_code_without_memory_is_blamed_only_under_our_own_limit(
    files: list[foreign.File], monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, "os.abort()", LOWER)
    with pytest.raises(InspectionError, match=r"inspection of 1: .*SIGABRT"):
        refusals(files)
    child(monkeypatch, "if path.name == 'deadly': os.abort()")
    assert [name for _, name, _ in refusals(files)] == ["2"]


def test_lower_limits_of_this_machine_are_kept(
    files: list[foreign.File], monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, before=LOWER)
    assert refusals(files) == []


def test_a_set_is_not_condemned_by_a_machine_that_cannot_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = collect(tmp_path / "set", "a")
    child(monkeypatch, before="raise ImportError")
    with pytest.raises(InspectionError, match="no file was judged"):
        verify(root, quarantine=True)
    assert not (root / "quarantine").exists()


def test_nothing_of_the_working_directory_runs(
    path: Path, segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("pyarrow.py", "specctl.py", "json.py"):
        (here / name).write_text(f"open({str(here / 'ran')!r}, 'w')")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}")
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    assert refusals([foreign.File(path, segment, "1")]) == []
    assert not (here / "ran").exists()


def test_many_commits_are_read_by_one_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"p{number}" for number in range(40)]
    with TraceWriter.open(tmp_path / "set", header()) as writer:
        for prompt in prompts:
            writer.commit([prompt], tables_of([prompt]))
    asked = []
    monkeypatch.setattr(foreign, "_run", lambda files: asked.append(len(files)) or all_ok(files))
    assert verify(tmp_path / "set").is_whole
    assert asked == [80]
