"""The writer acknowledges what is durable, refuses what it must, and stops after a failure."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl import durable
from specctl.collect.logs import read_commits
from specctl.collect.preparing import ABANDONED_S
from specctl.collect.reader import TraceSet
from specctl.collect.store import TraceWriter
from specctl.errors import InvariantError, OutputError, TraceCorruptError, TraceMismatchError
from specctl.stores.local import LocalStore
from specctl.trace import schema_id
from tests.collect.rounds import DIGEST, header
from tests.collect.sets import count_calls, rows_of, writer

__all__ = ["writer"]  # a fixture


def test_commit_is_readable_and_complete(writer: TraceWriter) -> None:
    tables = rows_of("a", "b")
    commit = writer.commit(["b", "a"], tables)
    opening, record = read_commits(writer.root).records
    assert (opening.seq, opening.prev_commit, opening.opens) == (0, None, "shard 1/1")
    assert record == commit
    assert (commit.seq, commit.prev_commit) == (1, opening.digest)
    assert commit.prompt_ids == ["a", "b"]
    traces = TraceSet.open(writer.root)
    assert traces.prompt_ids == ("a", "b")
    for name, table in tables.items():
        assert traces.scan(name).collect().to_arrow().to_pylist() == table.to_pylist()


def test_second_commit_points_to_the_first(writer: TraceWriter) -> None:
    first = writer.commit(["a"], rows_of("a"))
    second = writer.commit(["b"], rows_of("b"))
    assert (second.seq, second.prev_commit) == (2, first.digest)
    assert read_commits(writer.root).commits == (first, second)


def test_layout_is_the_one_of_the_format_page(writer: TraceWriter) -> None:
    commit = writer.commit(["a"], rows_of("a"))
    names = sorted(str(p.relative_to(writer.root)) for p in writer.root.rglob("*") if p.is_file())
    files = [f"data/{s.table}-{s.sha256[7:]}.parquet" for s in commit.files]
    records = [f"commits/{commit.writer}/0000000{seq}.json" for seq in (0, 1)]
    assert names == sorted(["trace.json", *records, *files])
    assert list((writer.root / "tmp").iterdir()) == []
    assert (writer.root / "trace.json").read_bytes() == header().to_bytes()


def test_segments_are_compressed_as_stated(writer: TraceWriter) -> None:
    commit = writer.commit(["a"], rows_of("a", rounds=4))
    for segment in commit.files:
        metadata = pq.read_metadata(segment.path(writer.root))
        assert metadata.metadata[b"specctl.schema_id"].decode() == schema_id(segment.table)
        group = metadata.row_group(0)
        for place in range(group.num_columns):
            chunk = group.column(place)
            kind = str(metadata.schema.column(place).physical_type)
            assert chunk.compression == "ZSTD"
            assert ("BYTE_STREAM_SPLIT" in chunk.encodings) == (kind == "FLOAT")
            assert ("RLE_DICTIONARY" in chunk.encodings) == (kind == "BYTE_ARRAY")


def test_prompt_without_rounds_is_finished_all_the_same(writer: TraceWriter) -> None:
    commit = writer.commit(["empty"], {})
    assert commit.files == []
    assert TraceSet.open(writer.root).prompt_ids == ("empty",)


def test_resume_leaves_only_what_is_pending(tmp_path: Path) -> None:
    for step, prompt in enumerate(["a", "b"]):
        with TraceWriter.open(tmp_path, header(), resume=step > 0) as writer:
            writer.commit([prompt], rows_of(prompt))
    with TraceWriter.open(tmp_path, header(), resume=True) as writer:
        assert writer.pending(["c", "b", "a", "d"]) == ["c", "d"]


def test_abandoned_files_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    TraceWriter.open(tmp_path, header()).close()
    left, used = tmp_path / "tmp" / "left.parquet", tmp_path / "tmp" / "used.parquet"
    for path in (left, used):
        path.write_bytes(b"PAR1")
    os.utime(left, (0, time.time() - ABANDONED_S - 1))
    TraceWriter.open(tmp_path, header(), resume=True).close()
    assert list((tmp_path / "tmp").iterdir()) == [used]


def test_files_that_go_while_others_are_cleared_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by random kills: another writer publishes what this one has just listed."""
    gone = tmp_path / "tmp" / "gone.parquet"
    gone.parent.mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda self: iter([gone]))
    assert LocalStore(tmp_path).clear_temporary(0.0) == []


def test_resume_starts_a_folder_killed_before_its_header(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "trace.json").write_bytes(b"{")
    with TraceWriter.open(tmp_path, header()) as writer:
        assert writer.committed == set()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target_digest": "sha256:" + "0" * 64}, "target_digest"),
        ({"policy_digest": "sha256:" + "0" * 64}, "policy_digest"),
        ({"drafter_digest": None}, "drafter_digest"),
        ({"sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}}, "temperature"),
        ({"collect": {"max_new_tokens": 64}}, "collect.max_new_tokens"),
    ],
)
def test_resume_with_another_run_names_the_field(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    TraceWriter.open(tmp_path, header()).close()
    with pytest.raises(TraceMismatchError, match=field):
        TraceWriter.open(tmp_path, header(**change), resume=True)
    TraceWriter.open(tmp_path, header(specctl_version="9"), resume=True).close()


@pytest.mark.parametrize("resume", [True, False])
def test_a_set_that_lost_its_header_gets_no_other_one(
    tmp_path: Path,
    resume: bool,  # noqa: FBT001
) -> None:
    """It would say of the rows that are there what was never true of them."""
    root = tmp_path / "traces"
    with TraceWriter.open(root, header()) as opened:
        opened.commit(["a"], rows_of("a"))
    (root / "trace.json").unlink()
    with pytest.raises(TraceCorruptError, match=r"trace.json: expected the header .* found none"):
        TraceWriter.open(root, header(collect={"max_new_tokens": 1}), resume=resume)
    assert not (root / "trace.json").exists()


def test_a_record_that_no_reader_would_take_is_not_written(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.collect.writer_log.MAX_RECORD_BYTES", 2000)
    writer.commit(["a"], {})
    with pytest.raises(OutputError, match="expected at most 2000 bytes"):
        writer.commit([f"{number:0100}" for number in range(20)], {})
    assert read_commits(writer.root).prompt_ids == ("a",)


def test_traces_without_resume_are_refused(tmp_path: Path) -> None:
    TraceWriter.open(tmp_path, header()).close()
    with pytest.raises(OutputError, match="--resume"):
        TraceWriter.open(tmp_path, header())


@pytest.mark.parametrize("resume", [True, False])
def test_other_folders_are_refused_untouched(tmp_path: Path, resume: bool) -> None:  # noqa: FBT001
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match=r"'thesis.tex' and no trace.json"):
        TraceWriter.open(tmp_path, header(), resume=resume)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="a folder, found a file"):
        TraceWriter.open(tmp_path / "file", header())
    with pytest.raises(OutputError, match="Not a directory"):
        TraceWriter.open(tmp_path / "file" / "below", header())
    with pytest.raises(OutputError, match="trace folder /proc/traces"):
        TraceWriter.open("/proc/traces", header())


def test_folder_in_use_is_refused(writer: TraceWriter) -> None:
    with pytest.raises(OutputError, match="locked by a running collector"):
        TraceWriter.open(writer.root, header(), resume=True)


def test_refused_resume_releases_the_folder(tmp_path: Path) -> None:
    TraceWriter.open(tmp_path, header()).close()
    with pytest.raises(TraceMismatchError):
        TraceWriter.open(tmp_path, header(drafter_digest=None), resume=True)
    TraceWriter.open(tmp_path, header(), resume=True).close()


def test_resume_refuses_a_set_that_lost_a_file(tmp_path: Path) -> None:
    with TraceWriter.open(tmp_path, header()) as writer:
        commit = writer.commit(["a"], rows_of("a"))
    commit.files[0].path(tmp_path).unlink()
    with pytest.raises(Exception, match="no file"):
        TraceWriter.open(tmp_path, header(), resume=True)


def test_prompt_is_never_committed_twice(writer: TraceWriter) -> None:
    writer.commit(["a"], rows_of("a"))
    with pytest.raises(InvariantError, match="'a'"):
        writer.commit(["b", "a"], rows_of("b", "a"))
    with pytest.raises(InvariantError):
        writer.commit(["c", "c"], rows_of("c"))


def test_closed_writer_takes_no_more(writer: TraceWriter) -> None:
    writer.close()
    with pytest.raises(OutputError, match="closed"):
        writer.commit(["a"], rows_of("a"))


CALLS = ("fsync", "link", "open")


@pytest.mark.parametrize("call", CALLS)
def test_failure_of_every_call_acknowledges_nothing(tmp_path: Path, call: str) -> None:
    """Fails each call of a commit in turn: no acknowledgement, and the set stays whole."""
    tables = rows_of("b")
    with pytest.MonkeyPatch.context() as patch:
        with TraceWriter.open(tmp_path / "all", header()) as writer:
            writer.commit(["a"], rows_of("a"))  # the first one creates folders as well
            calls = count_calls(patch, call, None)
            writer.commit(["b"], tables)
        total = calls[0]
    assert total >= 3
    for fail_at in range(total):
        check_failed_commit(tmp_path / str(fail_at), tables, call, fail_at)


def check_failed_commit(root: Path, tables: dict[str, pa.Table], call: str, fail_at: int) -> None:
    with TraceWriter.open(root, header()) as writer:
        writer.commit(["a"], rows_of("a"))
        with pytest.MonkeyPatch.context() as patch:
            count_calls(patch, call, fail_at)
            with pytest.raises(OutputError, match="Input/output error"):
                writer.commit(["b"], tables)
        assert writer.committed == {"a"}
        with pytest.raises(OutputError, match="an earlier commit that failed"):
            writer.commit(["c"], {})
    with TraceWriter.open(root, header(), resume=True) as writer:
        if "b" not in writer.committed:  # the record itself may have made it: unknown, not acked
            writer.commit(["b"], tables)
    assert TraceSet.open(root).prompt_ids == ("a", "b")


def test_every_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of calls is the protocol: a mutant without fsync must not pass."""
    events: list[tuple[str, int]] = []
    fsync, link = os.fsync, os.link

    def spy_fsync(descriptor: int) -> None:
        events.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def spy_link(source: Any, target: Any, **given: Any) -> None:
        events.append(("link", os.stat(source, dir_fd=given["src_dir_fd"]).st_ino))
        link(source, target, **given)
        events.append(("expect", os.fstat(given["dst_dir_fd"]).st_ino))

    with TraceWriter.open(tmp_path, header()) as writer:
        monkeypatch.setattr(durable.os, "fsync", spy_fsync)
        monkeypatch.setattr(durable.os, "link", spy_link)
        writer.commit(["a"], rows_of("a"))
    links = [place for place, (kind, _) in enumerate(events) if kind == "link"]
    assert len(links) == 3  # two segments, one record
    for place in links:
        assert ("sync", events[place][1]) in events[:place]
        assert events[place + 2] == ("sync", events[place + 1][1])  # its folder, at once


def test_unreadable_segment_is_not_acknowledged(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(rows: Any, stream: Any, **options: Any) -> None:
        pq_write(rows.slice(0, rows.num_rows - 1), stream, **options)

    pq_write = pq.write_table
    monkeypatch.setattr(pq, "write_table", write_half)
    with pytest.raises(OutputError, match="rows of schema"):
        writer.commit(["a"], rows_of("a"))
    assert read_commits(writer.root).commits == ()


def test_commit_record_is_canonical_json(writer: TraceWriter) -> None:
    commit = writer.commit(["a"], rows_of("a"))
    content = commit.path(writer.root).read_bytes()
    assert (
        content == json.dumps(json.loads(content), sort_keys=True, separators=(",", ":")).encode()
    )
    assert all(segment.sha256 != DIGEST for segment in commit.files)
