"""Copies of a bucket's segments, and the folders where segments for one are prepared."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from specctl.collect import cache, foreign, opening
from specctl.collect.cache import cache_folder, cached_path, fetch_all
from specctl.collect.commits import Segment
from specctl.collect.files import segment_path
from specctl.collect.logs import read_commits
from specctl.collect.spool import Spool
from specctl.collect.store import TraceWriter
from specctl.errors import TraceCorruptError
from tests.collect.inspections import all_ok
from tests.collect.memory_store import SetStore
from tests.collect.small_rows import tables_of
from tests.collect.takeovers import begun, take


@pytest.fixture(autouse=True)
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A cache of its own; the number of files that each child was given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[int] = []
    monkeypatch.setattr(foreign, "_run", lambda files: asked.append(len(files)) or all_ok(files))
    return asked


@pytest.fixture
def store() -> SetStore:
    store = begun(SetStore())
    with TraceWriter.named(store.place, "shard 1/1") as writer:
        for prompt in "ab":
            writer.commit([prompt], tables_of([prompt]))
    return store


def segments(store: SetStore) -> tuple[Segment, ...]:
    return read_commits(store.place).segments


def test_failures_are_by_segment_and_the_rest_is_fetched_together(
    store: SetStore, children: list[int]
) -> None:
    gone, altered, *whole = segments(store)
    store.delete(gone.key)
    store.kept[altered.key] = bytes(altered.size_bytes)
    failures = fetch_all(store.place, segments(store))
    assert set(failures) == {gone.key, altered.key}
    assert "no object" in str(failures[gone.key])
    assert all(cached_path(segment).is_file() for segment in whole)
    assert children == [2]
    assert not list(cache_folder().glob("segments/tmp-*"))


def test_what_the_child_refuses_gets_no_name(
    store: SetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is right, but the next reader would open it unread."""
    sound, odd = segments(store)[:2]

    def run(files: list[foreign.File]) -> foreign.Told:
        said = {sound: "ok 0", odd: "refused 0 an odd column"}
        lines = [line for file in files for line in ("begin 0", said[file.segment])]
        return foreign.Told(lines, "status 0", True, "")

    monkeypatch.setattr(foreign, "_run", run)
    failures = fetch_all(store.place, [sound, odd])
    assert set(failures) == {odd.key}
    assert "an odd column" in str(failures[odd.key])
    assert (cached_path(sound).is_file(), cached_path(odd).exists()) == (True, False)
    with pytest.raises(TraceCorruptError, match="an odd column"):
        segment_path(store.place, odd)


def test_copies_are_for_their_owner_alone(store: SetStore) -> None:
    folder = cache_folder() / "segments"
    folder.mkdir(parents=True, mode=0o755)  # of an earlier version
    before = os.umask(0o022)
    try:
        fetch_all(store.place, segments(store))
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})


def test_a_rotten_copy_is_fetched_again(store: SetStore, children: list[int]) -> None:
    fetch_all(store.place, segments(store))
    path = cached_path(segments(store)[0])
    path.write_bytes(bytes(path.stat().st_size))
    assert fetch_all(store.place, segments(store)) == {}
    assert children == [4, 1]


def test_skipping_checks_copies_too_and_asks_one_child(
    store: SetStore, children: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "open_place", lambda _: store.place)
    rounds, *_, last = segments(store)
    assert opening.open_log("set", damaged="skip").prompt_ids == ("a", "b")
    cached_path(rounds).write_bytes(bytes(rounds.size_bytes))
    assert opening.open_log("set", damaged="skip").damages == ()  # fetched again
    cached_path(rounds).write_bytes(bytes(rounds.size_bytes))
    store.delete(rounds.key)
    log = opening.open_log("set", damaged="skip")
    assert (log.prompt_ids, [damage.what for damage in log.damages]) == (("b",), [rounds.key])
    with pytest.raises(TraceCorruptError, match="no object"):
        opening.open_log("set")
    assert children == [4, 1]
    assert cached_path(last).is_file()


def test_trimming_spares_what_was_opened_today(
    store: SetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this process or by another: a fit reads lazily, long after it opened its sets."""
    monkeypatch.setattr(cache, "MAX_CACHE_BYTES", 0)
    first, second, *_ = segments(store)
    fetch_all(store.place, [first])
    fetch_all(store.place, [second])
    assert cached_path(first).is_file()
    aged(cached_path(first))
    cached_path(second).unlink()
    fetch_all(store.place, [second])
    assert not cached_path(first).exists()


def test_what_killed_processes_left_is_removed(store: SetStore) -> None:
    folder = cache_folder() / "segments"
    folder.mkdir(parents=True)
    old, young = folder / "tmp-old", folder / "tmp-young"
    for path in (old, young):
        path.write_bytes(b"half")
    aged(old)
    fetch_all(store.place, segments(store))
    assert (old.exists(), young.exists()) == (False, True)


def test_spools_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    living = Spool()
    dead = living.folder.parent / "of-a-process-that-was-killed"
    (dead / "tmp").mkdir(parents=True)
    for folder in (living.folder, dead):
        aged(folder)
    another = Spool()
    assert living.folder.is_dir()
    assert not dead.exists()
    for spool in (living, another):
        spool.close()
    assert not list(living.folder.parent.iterdir())


def test_own_log_is_believed_before_a_listing(store: SetStore) -> None:
    log = take(store.place)
    store.objects = lambda prefix: iter(())  # type: ignore[method-assign]
    chains = {log.taken[0].writer: log.taken}
    assert read_commits(store.place, chains=chains).prompt_ids == ("a", "b")


def aged(path: Path) -> None:
    old = time.time() - 2 * cache.IN_USE_S
    os.utime(path, (old, old))
