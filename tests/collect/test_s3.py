"""Sets in a bucket, on a real S3 server: written side by side, read through checked copies."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from specctl.collect.cache import cached_path
from specctl.collect.compacting import compact, prune
from specctl.collect.logs import read_commits
from specctl.collect.merging import merge
from specctl.collect.opening import open_log
from specctl.collect.places import open_place
from specctl.collect.reader import TraceSet
from specctl.collect.shards import Shard
from specctl.collect.snapshots import take_snapshot
from specctl.collect.store import TraceWriter
from specctl.collect.verifying import verify
from specctl.collect.writer_log import WriterFencedError
from specctl.errors import OutputError, TraceCorruptError, TraceError
from tests.cli.command import passes
from tests.collect.rounds import header
from tests.collect.sets import equal, rows
from tests.collect.small_rows import NUM_ROUNDS, tables_of

NUM_WRITERS, NUM_COMMITS = 4, 50


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def collect(url: str, *groups: str) -> str:
    with TraceWriter.open(url, header()) as writer:
        for group in groups:
            writer.commit(group, tables_of(group))
    return url


def test_a_bucket_holds_what_a_folder_would(s3_url: str, tmp_path: Path) -> None:
    collect(s3_url, "ab", "c")
    collect(str(tmp_path / "local"), "ab", "c")
    assert equal(rows(s3_url), rows(tmp_path / "local"))
    assert not list((tmp_path / "cache" / "specctl" / "spool").iterdir())
    with pytest.raises(OutputError, match="--resume"):
        collect(s3_url, "d")


def test_resume_takes_over_and_fences(s3_url: str) -> None:
    old = TraceWriter.open(s3_url, header())
    old.commit(["a"], tables_of("a"))
    with TraceWriter.open(s3_url, header(), resume=True) as new:
        assert new.pending("ab") == ["b"]
        with pytest.raises(WriterFencedError, match="epoch 1 to be the newest, found epoch 2"):
            old.commit(["b"], tables_of("b"))
        new.commit(["b"], tables_of("b"))
    old.close()
    assert TraceSet.open(s3_url).prompt_ids == ("a", "b")


def test_writers_side_by_side_lose_and_double_nothing(s3_url: str) -> None:
    acked: list[str] = []

    def write(index: int) -> None:
        with TraceWriter.open(s3_url, header(), shard=Shard(index, NUM_WRITERS)) as writer:
            for step in range(NUM_COMMITS):
                prompt = f"{index}-{step}"
                writer.commit([prompt], tables_of([prompt]) if step < 2 else {})
                acked.append(prompt)

    threads = [threading.Thread(target=write, args=(i + 1,)) for i in range(NUM_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = read_commits(s3_url)
    assert len(log.commits) == NUM_WRITERS * NUM_COMMITS == len(acked)
    assert set(log.prompt_ids) == set(acked)
    traces = TraceSet.open(s3_url)
    assert traces.scan("rounds").collect().height == NUM_WRITERS * 2 * NUM_ROUNDS


def test_copies_are_checked_on_their_way_and_at_home(s3_url: str) -> None:
    collect(s3_url, "a")
    place = open_place(s3_url)
    segment = read_commits(place).segments[0]
    TraceSet.open(s3_url)
    cached_path(segment).write_bytes(b"rotten")
    TraceSet.open(s3_url)  # fetched again
    assert verify(s3_url).is_whole
    place.store.delete(segment.key)
    place.store.put_new(segment.key, b"other bytes")
    TraceSet.open(s3_url)  # the copy is still what was committed
    assert segment.key in verify(s3_url).damages[0].reason
    cached_path(segment).unlink()
    with pytest.raises(TraceCorruptError, match=segment.key):
        TraceSet.open(s3_url)


def test_snapshot_compaction_and_merge(s3_url: str, tmp_path: Path) -> None:
    collect(s3_url, "ab", "c")
    before, taken = rows(s3_url), take_snapshot(open_log(s3_url))
    assert compact(s3_url).num_commits == 1
    assert equal(rows(s3_url), before)
    assert prune(s3_url, grace_s=-60.0) == (0, 0)  # the snapshot holds them
    assert TraceSet.open(taken.reference).prompt_ids == ("a", "b", "c")
    merge([taken.reference], str(tmp_path / "local"))
    assert equal(rows(tmp_path / "local"), before)
    merge([str(tmp_path / "local")], f"{s3_url}-copy")
    assert equal(rows(f"{s3_url}-copy"), before)


def test_a_bucket_without_a_set_is_told(s3_url: str) -> None:
    with pytest.raises(TraceError, match=r"trace\.json"):
        TraceSet.open(s3_url)


def test_collect_and_replay_speak_s3(s3_url: str, tmp_path: Path) -> None:
    options = ("--dense", "--depth", "3", "--top-k", "3", "--max-new-tokens", "6", "--limit", "2")
    machine = ("--device", "cpu", "--threads", "1")
    passes("collect", "embedded", "-o", s3_url, *options, *machine)
    passes("collect", "embedded", "-o", str(tmp_path / "local"), *options, *machine)
    reference = passes("traces", "snapshot", s3_url).out.split()[-1]
    there = passes("replay", reference, "-p", "chain:num_draft_tokens=2").out
    here = passes("replay", str(tmp_path / "local"), "-p", "chain:num_draft_tokens=2").out
    assert there == here
