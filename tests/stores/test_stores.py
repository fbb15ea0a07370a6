"""What every store promises, on a folder and on a real S3 server."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from specctl.errors import InvariantError, StoreError, UsageError
from specctl.stores import (
    KeyAbsentError,
    KeyTakenError,
    ObjectStore,
    ObjectTooLargeError,
    create,
    ensure,
    open_store,
    probe,
)

pytestmark = pytest.mark.usefixtures("no_waits")


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return open_store(tmp_path / "store")
    return open_store(request.getfixturevalue("s3_url"))


def test_a_taken_key_is_refused_and_untouched(store: ObjectStore) -> None:
    store.put_new("a/b.json", b"one")
    with pytest.raises(KeyTakenError):
        store.put_new("a/b.json", b"two")
    assert store.get("a/b.json", max_bytes=3) == b"one"


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
    assert all(one.size_bytes == 2 for one in found)
    assert [one.key for one in store.objects("")] == ["log/b/1", "log/b/2", "log/bc/1", "other"]
    assert list(store.objects("none")) == []


def test_one_of_many_wins(store: ObjectStore) -> None:
    won: list[int] = []

    def race(number: int) -> None:
        with suppress(KeyTakenError):
            store.put_new("prize", f"{number}".encode())
            won.append(number)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(race, range(16)))
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
    with pytest.raises(StoreError, match="registry verify"):
        ensure(store, "blobs/x", b"one")


def test_children_are_what_is_directly_below(store: ObjectStore) -> None:
    assert store.children("log") == []
    for key in ("log/b/2/3", "log/b/1", "log/a", "logs/c"):
        store.put_new(key, b"12")
    assert store.children("log") == ["a", "b"]
    assert store.children("log/b") == ["1", "2"]


def test_a_good_store_passes_the_probe_every_time(store: ObjectStore) -> None:
    probe(store)
    probe(store)


@pytest.mark.parametrize(
    "key", ["", "/a", "a/../b", "a//b", ".", "a/.", "a b", "é", "a\n", "-" * 999]
)
def test_keys_that_could_be_read_in_two_ways_are_a_bug(key: str, tmp_path: Path) -> None:
    with pytest.raises(InvariantError):
        open_store(tmp_path).put_new(key, b"")


def test_a_file_is_put_once(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "store" / "segment"  # a file of the store's own disk
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"same")
    store.put_new("data/same", b"same")
    store.put_new("data/other", b"other")
    for key in ("data/same", "data/new"):
        create(store, key, path)
        assert store.get(key, max_bytes=9) == b"same"
    with pytest.raises(KeyTakenError):
        create(store, "data/other", path)
    assert store.get("data/other", max_bytes=9) == b"other"


@pytest.mark.parametrize("place", ["s3://bucket/qwen@prod", "a@b", "./s3:/x@y"])
def test_an_at_in_a_path_is_no_secret(place: str) -> None:
    assert "@" in open_store(place).url


def test_a_folder_that_no_message_could_name_is_refused() -> None:
    with pytest.raises(UsageError, match="UTF-8") as refused:
        open_store(os.fsdecode(b"/srv/\xff"))
    assert str(refused.value).encode()
