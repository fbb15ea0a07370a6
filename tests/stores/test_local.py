"""The folder as a store: links, syncs, unfinished files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from specctl.errors import StoreError
from specctl.stores import create, local, open_store
from specctl.stores.folders import MAX_DEPTH
from tests.collect.power import Recorder, path_of, states

pytestmark = pytest.mark.usefixtures("no_waits")


def test_links_and_devices_are_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (tmp_path / "secret").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for key in ("link", "pipe"):
        with pytest.raises(StoreError):
            store.get(key, max_bytes=9)


def test_a_failing_disk_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    store.put_new("a/b", b"1")

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(local, "_read_regular", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        store.get("a/b", max_bytes=1)


def test_a_failure_to_read_is_not_a_matter_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.put_new("a/b", b"1")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("specctl.stores.folders.os.open", fail)
    for read in (
        lambda: store.get("a/b", max_bytes=9),
        lambda: list(store.objects("a")),
        lambda: store.children("a"),
    ):
        with pytest.raises(
            StoreError, match=r"folder that can be read, .*check the disk"
        ) as caught:
            read()
        assert "space" not in str(caught.value)
    with pytest.raises(StoreError, match="free space"):
        store.put_new("a/c", b"1")


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


def test_a_file_url_is_its_folder(tmp_path: Path) -> None:
    open_store(tmp_path.as_uri()).put_new("a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_folder_too_deep_to_enter_is_listed_as_it_is(tmp_path: Path) -> None:
    """Else whoever may write there ends every listing: by Python's stack, or by open files."""
    store = open_store(tmp_path)
    store.put_new("log/a/1", b"1")
    deep = tmp_path.joinpath("log", *["d"] * (2 * MAX_DEPTH))
    deep.mkdir(parents=True)
    shallow, strange = sorted(one.key for one in store.objects("log"))
    assert shallow == "log/a/1"
    assert strange == "/".join(["log", *["d"] * MAX_DEPTH])
