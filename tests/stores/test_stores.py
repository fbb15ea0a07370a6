"""What every store promises, on a folder and on a real S3 server; and what a bad one is told."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from specctl.errors import InvariantError, StoreError, UsageError
from specctl.stores import (
    KeyAbsentError,
    KeyTakenError,
    ObjectStore,
    create,
    creating,
    open_store,
    probe,
    s3,
)
from specctl.stores.creating import create_file, ensure
from specctl.stores.interface import (
    MAX_REQUEST_S,
    ObjectTooLargeError,
    TransientError,
    UnknownOutcomeError,
)
from specctl.stores.local import LocalStore
from tests.collect.power import Recorder, path_of, states


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return open_store(tmp_path / "store")
    return open_store(request.getfixturevalue("s3_url"))


def test_what_was_put_is_read_back(store: ObjectStore) -> None:
    store.put_new("a/b.json", b"one")
    assert store.get("a/b.json", max_bytes=3) == b"one"


def test_a_taken_key_is_refused_and_untouched(store: ObjectStore) -> None:
    store.put_new("a", b"one")
    with pytest.raises(KeyTakenError):
        store.put_new("a", b"two")
    assert store.get("a", max_bytes=9) == b"one"


def test_absent_and_too_large_are_told_apart(store: ObjectStore) -> None:
    store.put_new("a", b"four")
    with pytest.raises(KeyAbsentError):
        store.get("b", max_bytes=9)
    with pytest.raises(KeyAbsentError):
        store.get("a/b", max_bytes=9)
    with pytest.raises(ObjectTooLargeError):
        store.get("a", max_bytes=3)


def test_listing_is_by_whole_segments_and_sorted(store: ObjectStore) -> None:
    for key in ("log/b/2", "log/b/1", "log/bc/1", "other"):
        store.put_new(key, b"12")
    found = list(store.objects("log/b"))
    assert [one.key for one in found] == ["log/b/1", "log/b/2"]
    assert all(one.size_bytes == 2 and one.modified_s > 1e9 for one in found)
    assert [one.key for one in store.objects("")] == ["log/b/1", "log/b/2", "log/bc/1", "other"]
    assert list(store.objects("none")) == []


def test_deleting_twice_is_fine(store: ObjectStore) -> None:
    store.put_new("a", b"1")
    store.delete("a")
    store.delete("a")
    assert list(store.objects("")) == []


def test_one_of_many_wins(store: ObjectStore) -> None:
    won: list[int] = []

    def race(number: int) -> None:
        try:
            store.put_new("prize", f"{number}".encode())
            won.append(number)
        except KeyTakenError:
            pass

    threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("prize", max_bytes=9) == f"{won[0]}".encode()


def test_creating_the_same_bytes_again_is_a_success(store: ObjectStore) -> None:
    create(store, "a", b"one")
    create(store, "a", b"one")
    for other in (b"two", b"longer than one"):
        with pytest.raises(KeyTakenError):
            create(store, "a", other)


def test_other_bytes_under_a_digest_are_an_alarm(store: ObjectStore) -> None:
    store.put_new("blobs/x", b"altered")
    with pytest.raises(StoreError, match="fsck"):
        ensure(store, "blobs/x", b"one")


def test_a_good_store_passes_the_probe_every_time(store: ObjectStore) -> None:
    probe(store)
    probe(store)


@pytest.mark.parametrize(
    "key", ["", "/a", "a/../b", "a//b", ".", "a/.", "a b", "é", "a\n", "-" * 999]
)
def test_keys_that_could_be_read_in_two_ways_are_a_bug(key: str, tmp_path: Path) -> None:
    with pytest.raises(InvariantError):
        open_store(tmp_path).put_new(key, b"")


# ------------------------------------------------------------------ stores that misbehave


class Faulty:
    """A folder whose puts end as told: `lost` before, `late` after the bytes were stored."""

    def __init__(self, root: Path, outcomes: list[str]) -> None:
        self.inner, self.outcomes, self.url = open_store(root), outcomes, "faulty"
        self.objects, self.delete = self.inner.objects, self.inner.delete

    def put_new(self, key: str, data: bytes) -> None:
        outcome = self.outcomes.pop(0) if self.outcomes else "good"
        if outcome == "ignores the condition":
            self.inner.delete(key)
        if outcome != "lost":
            self.inner.put_new(key, data)
        if outcome in ("lost", "late"):
            raise UnknownOutcomeError(key, expected="an answer", found="a timeout", fix="retry")

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if self.outcomes and self.outcomes[0] == "unreadable":
            self.outcomes.pop(0)
            raise TransientError(key, expected="an answer", found="a timeout", fix="retry")
        return self.inner.get(key, max_bytes=max_bytes)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.stores.creating.FIRST_WAIT_S", 0.0)


@pytest.mark.parametrize(
    "outcomes",
    [["lost"], ["late"], ["lost", "late"], ["late", "unreadable"], ["lost", "unreadable", "late"]],
    ids=" ".join,
)
def test_an_unknown_outcome_is_resolved_by_reading(tmp_path: Path, outcomes: list[str]) -> None:
    store = Faulty(tmp_path, outcomes)
    create(store, "a", b"mine")
    assert store.get("a", max_bytes=9) == b"mine"


@pytest.mark.parametrize("outcome", ["lost", "late"])
def test_an_unknown_outcome_never_hides_another_winner(tmp_path: Path, outcome: str) -> None:
    store = Faulty(tmp_path, [outcome] if outcome == "lost" else [])
    store.inner.put_new("a", b"another's")
    with pytest.raises(KeyTakenError):
        create(store, "a", b"mine")


def test_endless_trouble_ends_in_an_unknown_outcome(tmp_path: Path) -> None:
    with pytest.raises(UnknownOutcomeError):
        create(Faulty(tmp_path, ["lost"] * 99), "a", b"mine")


def test_no_put_is_begun_after_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection counts on it: what takes effect later may be deleted."""
    now_s, begun = [0.0], []
    store = Faulty(tmp_path, ["lost"] * 99)
    put = store.put_new

    def slow(key: str, data: bytes) -> None:
        begun.append(now_s[0])
        now_s[0] += MAX_REQUEST_S
        put(key, data)

    monkeypatch.setattr(store, "put_new", slow)
    monkeypatch.setattr(creating, "elapsed_s", lambda: now_s[0])
    with pytest.raises(UnknownOutcomeError):
        create(store, "a", b"mine")
    assert len(begun) == 4
    assert begun[-1] <= creating.LAST_TRY_S
    assert begun[-1] + MAX_REQUEST_S <= creating.MAX_CREATE_S
    assert timedelta(seconds=MAX_REQUEST_S) == s3.TIMEOUT + s3.CONNECT_TIMEOUT


def test_a_store_that_overwrites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="overwrote"):
        probe(Faulty(tmp_path, ["ignores the condition"] * 99))


# ------------------------------------------------------------------ the folder


def test_links_and_devices_are_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (tmp_path / "secret").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for key in ("link", "pipe"):
        with pytest.raises(StoreError):
            store.get(key, max_bytes=9)


def test_a_failed_sync_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store")
    store.put_new("first", b"1")

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        store.put_new("second", b"2")
    monkeypatch.undo()
    assert [one.key for one in store.objects("")] == ["first"]


def test_bytes_found_in_place_count_only_once_their_name_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder cannot be synced, twice; the third try syncs before it says yes."""
    store, synced = open_store(tmp_path), []

    def sync(descriptor: int) -> None:
        synced.append(Path(path_of(descriptor)).name)
        if synced[-1] == "log" and synced.count("log") <= 2:
            raise OSError(5, "Input/output error")

    store.put_new("log/0", b"first")
    monkeypatch.setattr("os.fsync", sync)
    for _ in range(2):
        with pytest.raises(StoreError, match="Input/output error"):
            create(store, "log/1", b"mine")
    create(store, "log/1", b"mine")
    assert synced.count("log") == 3


@pytest.mark.parametrize("bytes_there", [b"same", b"other"])
def test_a_file_is_put_once(store: ObjectStore, tmp_path: Path, bytes_there: bytes) -> None:
    place = tmp_path / "store" if isinstance(store, LocalStore) else tmp_path
    place.mkdir(exist_ok=True)
    (place / "segment").write_bytes(b"same")
    store.put_new("data/x", bytes_there)
    if bytes_there == b"same":
        create_file(store, "data/x", place / "segment")
    else:
        with pytest.raises(KeyTakenError):
            create_file(store, "data/x", place / "segment")
    create_file(store, "data/y", place / "segment")
    assert store.get("data/y", max_bytes=9) == b"same"
    assert store.get("data/x", max_bytes=9) == bytes_there


def test_folders_that_a_dead_process_made_survive_with_what_is_put_there(tmp_path: Path) -> None:
    """It made them and died before they were synced; then another one's put was acknowledged."""
    recorder = Recorder(tmp_path)
    with recorder.installed():
        for folder in ("store", "store/log", "store/log/a"):
            os.mkdir(tmp_path / folder)
        open_store(tmp_path / "store").put_new("log/a/1", b"one")
        recorder.ack("one")
    after = [state for state in states(recorder.events) if state.acked]
    assert after
    for state in after:
        assert {"store", "store/log", "store/log/a"} <= state.folders
        assert state.files["store/log/a/1"] == b"one"


def test_unfinished_files_are_neither_listed_nor_kept_forever(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put_new("a", b"1")
    (tmp_path / "tmp" / "left").write_bytes(b"torn")
    assert [one.key for one in store.objects("")] == ["a"]
    assert store.clear_temporary(3600) == []  # type: ignore[attr-defined]
    assert store.clear_temporary(-1) == ["left"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", ["gs://bucket", "http://host/x", "s3:///no-bucket"])
def test_other_urls_are_refused(place: str) -> None:
    with pytest.raises(UsageError):
        open_store(place)


def test_a_file_url_is_its_folder(tmp_path: Path) -> None:
    open_store(tmp_path.as_uri()).put_new("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"


# ------------------------------------------------------------------ S3


def test_an_s3_that_does_not_answer_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    store = open_store("s3://bucket/x")
    with pytest.raises(TransientError):
        store.get("a", max_bytes=1)
    with pytest.raises(UnknownOutcomeError):
        store.put_new("a", b"1")


def test_a_missing_bucket_is_named(s3_url: str) -> None:
    with pytest.raises(StoreError, match="no-such-bucket"):
        open_store("s3://no-such-bucket/x").put_new("a", b"1")
