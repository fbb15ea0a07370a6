"""A reader gives committed rows, and refuses everything that the format page says it must."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.collect.commits import Commit, Segment
from specctl.collect.logs import read_commits
from specctl.collect.places import open_place
from specctl.collect.reader import TraceSet
from specctl.collect.store import TraceWriter
from specctl.errors import (
    TraceCorruptError,
    TraceError,
    TraceMismatchError,
    TraceSchemaError,
    UsageError,
)
from tests.collect.rounds import header
from tests.collect.sets import collect, edit, flip, rows_of, segments


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return collect(tmp_path / "traces", "ab", "c")


def records(root: Path) -> list[Path]:
    return sorted((root / "commits").glob("*/*.json"))


def test_set_holds_what_was_committed(root: Path) -> None:
    traces = TraceSet.open(root)
    assert traces.header == header()
    assert traces.prompt_ids == ("a", "b", "c")
    rounds = traces.scan("rounds").select("prompt_id", "round_idx").collect()
    assert sorted(rounds.iter_rows()) == [(p, step) for p in "abc" for step in (0, 1)]


def test_summary_counts(root: Path) -> None:
    summary = TraceSet.open(root).summary()
    assert (summary["num_commits"], summary["num_prompts"], summary["num_requests"]) == (2, 3, 3)
    assert (summary["num_rounds"], summary["num_nodes"]) == (6, 6 * 22)
    assert summary["num_emitted"] == summary["num_accepted"] + 6
    assert summary["size_bytes"] == sum(segment.size_bytes for segment in segments(root))


def test_empty_set_has_typed_tables(tmp_path: Path) -> None:
    traces = TraceSet.open(collect(tmp_path / "none"), verify=True)
    full = TraceSet.open(collect(tmp_path / "one", "a"))
    for table in ("rounds", "nodes"):
        assert traces.scan(table).collect_schema() == full.scan(table).collect_schema()
        assert traces.scan(table).collect().height == 0
    assert traces.summary()["num_rounds"] == 0


def test_files_without_a_commit_are_not_read(root: Path) -> None:
    shutil.copy(segments(root)[0].path(root), root / "data" / ("rounds-" + "0" * 64 + ".parquet"))
    assert TraceSet.open(root).summary()["num_rounds"] == 6


def test_unknown_table_and_no_folder_are_refused(root: Path) -> None:
    with pytest.raises(UsageError, match="rounds or nodes"):
        TraceSet.open(root).scan("tokens")
    with pytest.raises(UsageError):
        TraceSet.open()


def test_other_places_are_not_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such folder"):
        TraceSet.open(tmp_path / "absent")
    with pytest.raises(TraceError, match="another folder"):
        TraceSet.open(tmp_path)


# --------------------------------------------------------------------------- damaged files


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damaged_file_is_named(root: Path, damage: Callable[[Path], None], which: int) -> None:
    path = segments(root)[which].path(root)
    damage(path)
    with pytest.raises(TraceCorruptError, match=path.name):
        TraceSet.open(root)


def test_sizes_are_checked_even_without_digests(root: Path) -> None:
    path = segments(root)[0].path(root)
    flip(path)
    TraceSet.open(root, verify=False)
    truncate(path)
    with pytest.raises(TraceCorruptError, match="bytes"):
        TraceSet.open(root, verify=False)


def test_swapped_files_are_refused(root: Path) -> None:
    first, second = (s.path(root) for s in segments(root) if s.table == "nodes")
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(TraceCorruptError, match="nodes-"):
        TraceSet.open(root)


def test_fields_that_a_log_has_are_in_all_that_follow(root: Path) -> None:
    """Who strips a record of its digest must not get it through."""
    path = records(root)[-1]
    whole = Commit.model_validate_json(path.read_bytes())
    for name in ("body_digest", "header_digest"):
        value = whole.model_dump() | {name: None}
        stripped = Commit(**(value | {"body_digest": None}))
        path.write_bytes((stripped if name == "body_digest" else stripped.sealed()).to_bytes())
        with pytest.raises(TraceCorruptError, match=f"a {name}, as the record before it has"):
            TraceSet.open(root, verify=False)


@pytest.mark.parametrize("change", [b" ", b'{"trace_version":1,'])
@pytest.mark.parametrize("which", ["trace.json", "record"])
def test_other_bytes_of_the_same_fields_are_refused(root: Path, which: str, change: bytes) -> None:
    path = root / which if which == "trace.json" else records(root)[-1]
    whole = path.read_bytes()
    path.write_bytes(change + (whole[1:] if change != b" " else whole))
    with pytest.raises(TraceCorruptError, match="altered bytes"):
        TraceSet.open(root, verify=False)


def test_gap_in_the_chain_is_refused(root: Path) -> None:
    records(root)[0].unlink()
    with pytest.raises(TraceCorruptError, match=r"00000000.json: expected record 0"):
        TraceSet.open(root)


@pytest.mark.parametrize("length", [0, 1, 50])
def test_torn_record_is_refused(root: Path, length: int) -> None:
    path = records(root)[1]
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(TraceCorruptError, match=path.name):
        TraceSet.open(root)


HEADER_DAMAGE = {
    "version": ({"trace_version": 2}, TraceSchemaError, "expected trace_version 1, found 2"),
    "unknown field": ({"epoch": 1}, TraceSchemaError, "epoch"),
    "wrong type": ({"collect": 3}, TraceSchemaError, "collect"),
    "not a digest": ({"target_digest": "abc"}, TraceSchemaError, "target_digest"),
    "other columns": ({"schema_ids": {"rounds": "sha256:" + "0" * 64}}, TraceSchemaError, "rounds"),
    "another table": (
        {"schema_ids": header().schema_ids | {"texts": "sha256:" + "0" * 64}},
        TraceSchemaError,
        "'texts'",
    ),
    "machines that are no names": (
        {"collect": {"domain": {"hardware": 5}}},
        TraceSchemaError,
        "domain.hardware",
    ),
    "tokens without a mode": ({"collect": {"tokens": {}}}, TraceSchemaError, "tokens.mode"),
    "tokens as a word": ({"collect": {"tokens": "drop"}}, TraceSchemaError, "collect.*tokens"),
    "another run": (
        {"sampling": {"temperature": 0.7}},
        TraceCorruptError,
        "trace.json.*as commits",
    ),
}


@pytest.mark.parametrize("name", HEADER_DAMAGE)
def test_header_is_read_strictly(root: Path, name: str) -> None:
    changes, error, message = HEADER_DAMAGE[name]
    edit(root / "trace.json", **changes)
    with pytest.raises(error, match=message):
        TraceSet.open(root)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"PAR1"])
def test_header_that_is_not_json_is_corrupt(root: Path, content: bytes) -> None:
    (root / "trace.json").write_bytes(content)
    with pytest.raises(TraceCorruptError, match=r"trace.json"):
        TraceSet.open(root)


def test_record_of_other_columns_is_refused(root: Path) -> None:
    rewrite(root, lambda s: s.model_copy(update={"schema_id": "sha256:" + "0" * 64}))
    with pytest.raises(TraceSchemaError, match="schema"):
        TraceSet.open(root)


def test_record_cannot_point_out_of_the_folder(root: Path) -> None:
    rewrite(root, lambda s: s.model_copy(update={"table": "../../etc/passwd"}))
    with pytest.raises(TraceSchemaError, match="table"):
        TraceSet.open(root)


def rewrite(root: Path, change: Callable[[Segment], Segment]) -> None:
    """The last commit record with altered segments, well-formed otherwise."""
    path = records(root)[-1]
    commit = Commit.model_validate_json(path.read_bytes())
    files = [change(segment) for segment in commit.files]
    path.write_bytes(commit.model_copy(update={"files": files}).to_bytes())


# --------------------------------------------------------------------------- doubles and unions


def test_prompt_of_two_writers_is_refused(tmp_path: Path) -> None:
    """As if two machines had collected into one folder: the union counts `a` twice."""
    first, second = collect(tmp_path / "1", "ab"), collect(tmp_path / "2", "a")
    shutil.copytree(second / "data", first / "data", dirs_exist_ok=True)
    with TraceWriter.named(open_place(first), "another") as writer:
        [commit] = read_commits(second).commits
        writer._log.append(commit.files, commit.prompt_ids)
    with pytest.raises(TraceCorruptError, match=r"'a' in two, commits/.*01.json and commits/"):
        TraceSet.open(first)


def test_double_rounds_are_refused(tmp_path: Path) -> None:
    with TraceWriter.open(tmp_path, header()) as writer:
        writer.commit(["a"], rows_of("a"))
        writer.commit(["b"], rows_of("a"))  # a collector that mislabels its rows
    with pytest.raises(TraceCorruptError, match=r"'a/0'.* twice"):
        TraceSet.open(tmp_path)


def test_folders_of_one_pair_are_read_together(root: Path, tmp_path: Path) -> None:
    other = header(policy_digest="sha256:" + "1" * 64)
    more = collect(tmp_path / "more", "d", made=other)
    traces = TraceSet.open(root, more)
    assert traces.prompt_ids == ("a", "b", "c", "d")
    assert traces.summary()["num_rounds"] == 8


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target_digest": "sha256:" + "0" * 64}, "target_digest"),
        ({"tokenizer_digest": "sha256:" + "0" * 64}, "tokenizer_digest"),
        ({"sampling": {"temperature": 1.0}}, "sampling"),
    ],
)
def test_folders_of_other_pairs_are_not(
    root: Path, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    more = collect(tmp_path / "more", "d", made=header(**change))
    with pytest.raises(TraceMismatchError, match=field):
        TraceSet.open(root, more)


def test_folders_that_share_prompts_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceMismatchError, match="'a'"):
        TraceSet.open(root, collect(tmp_path / "more", "a"))
    with pytest.raises(TraceMismatchError):
        TraceSet.open(root, root)


def test_collect_loads_without_the_dataframe_libraries() -> None:
    """The recorder sits beside a serving loop: polars and pyarrow load when rows are written."""
    code = (
        "import sys; import specctl.collect.recorder, specctl.collect.reader, "
        "specctl.collect.prompts; sys.exit(bool({'polars', 'pyarrow'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("verify", [True, False])
def test_a_link_is_no_segment(root: Path, tmp_path: Path, verify: bool) -> None:  # noqa: FBT001
    """Bytes outside of the set may change, and may not be its writer's to read."""
    [path, *_] = [segment.path(root) for segment in segments(root)]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceCorruptError, match="found a link"):
        TraceSet.open(root, verify=verify)
    (tmp_path / "elsewhere").rename(path)
    TraceSet.open(root, verify=verify)
    (root / "data").rename(tmp_path / "data")
    (root / "data").symlink_to(tmp_path / "data")
    with pytest.raises(TraceCorruptError, match="found a link"):
        TraceSet.open(root, verify=verify)
