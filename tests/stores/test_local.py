"""The folder as a store: links, rights of a group, syncs, unfinished files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from specctl.errors import StoreError
from specctl.stores import (
    KeyAbsentError,
    KeyTakenError,
    LocalStore,
    UnreadableError,
    create,
    local,
    open_store,
)
from specctl.stores.local import MAX_DEPTH
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


def test_a_failure_to_read_is_not_a_matter_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.put_new("a/b", b"1")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("specctl.stores.local.os.open", fail)
    for read in (lambda: store.get("a/b", max_bytes=9), lambda: list(store.objects("a"))):
        with pytest.raises(StoreError, match=r"cannot be read.*check the disk"):
            read()
    with pytest.raises(StoreError, match="free space"):
        store.put_new("a/c", b"1")


def test_a_folder_that_is_closed_to_the_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a teammate with a umask of 077. Root may enter everything, so the refusal is made up."""
    store, real = open_store(tmp_path), local.enter
    store.put_new("log/a/1", b"1")

    def enter(above: int, name: str) -> int:
        if name == "a":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(above, name)

    monkeypatch.setattr(local, "enter", enter)
    for attempt in (
        lambda: store.get("log/a/1", max_bytes=9),
        lambda: list(store.objects("log")),
        lambda: store.put_new("log/a/2", b"1"),
    ):
        with pytest.raises(UnreadableError, match=r"log/a is closed to this user.*chmod"):
            attempt()


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
    store = LocalStore(tmp_path)
    store.put_new("a", b"1")
    (tmp_path / "tmp" / "left").write_bytes(b"torn")
    assert [one.key for one in store.objects("")] == ["a"]
    assert store.clear_temporary(3600) == []
    assert store.clear_temporary(-1) == ["left"]


def test_a_folder_too_deep_to_enter_is_listed_as_it_is(tmp_path: Path) -> None:
    """Else whoever may write there ends every listing: by Python's stack, or by open files."""
    store = open_store(tmp_path)
    store.put_new("log/a/1", b"1")
    deep = tmp_path.joinpath("log", *["d"] * (2 * MAX_DEPTH))
    deep.mkdir(parents=True)
    shallow, strange = sorted(one.key for one in store.objects("log"))
    assert shallow == "log/a/1"
    assert strange == "/".join(["log", *["d"] * MAX_DEPTH])


# ------------------------------------------------------------------ links


def outside(tmp_path: Path) -> Path:
    """A folder of somebody else, with a file and a folder in it."""
    (tmp_path / "home" / "sub").mkdir(parents=True)
    for name in ("thesis.tex", "sub/data.csv"):
        (tmp_path / "home" / name).write_text(name)
        os.utime(tmp_path / "home" / name, (1, 1))
    return tmp_path / "home"


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("link", ["a", "a/b"])
def test_a_link_on_the_way_is_never_followed(tmp_path: Path, link: str) -> None:
    home, root = outside(tmp_path), tmp_path / "store"
    store = open_store(root)
    store.put_new("other", b"1")
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(home)
    segment = tmp_path / "segment"
    segment.write_bytes(b"1")
    below = "a/b/c" if link == "a/b" else "a/thesis.tex"
    for attempt in (
        lambda: store.put_new(below, b"mine"),
        lambda: store.put_new(f"{link}/new/file", b"mine"),
        lambda: store.put_file(f"{link}/file", segment),
        lambda: store.get(f"{link}/thesis.tex", max_bytes=99),
        lambda: store.children(link),
        lambda: list(store.objects(link)),
        lambda: list(store.objects(f"{link}/sub")),
    ):
        with pytest.raises(StoreError, match=r"is a link.*remove it"):
            attempt()
    assert files_in(home) == ["sub/data.csv", "thesis.tex"]
    assert sorted(path.name for path in home.iterdir()) == ["sub", "thesis.tex"]
    assert link in [one.key for one in store.objects("")], "so that whoever checks can see it"


def test_a_temporary_folder_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    home, root = outside(tmp_path), tmp_path / "store"
    root.mkdir()
    (root / "tmp").symlink_to(home)
    store = LocalStore(root)
    for attempt in (lambda: store.clear_temporary(60), lambda: store.put_new("a", b"1")):
        with pytest.raises(StoreError, match=r"tmp is a link"):
            attempt()
    assert files_in(home) == ["sub/data.csv", "thesis.tex"]


def test_a_link_that_takes_a_folders_place_while_it_is_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a folder and its opening."""
    home, root = outside(tmp_path), tmp_path / "store"
    store, real, swapped = open_store(root), local.enter, list[Path]()
    store.put_new("a/b/c", b"1")

    def enter(above: int, name: str) -> int:
        if name == "b" and not swapped:
            swapped.append((root / "a" / "b").rename(tmp_path / "moved"))
            (root / "a" / "b").symlink_to(home)
        return real(above, name)

    monkeypatch.setattr(local, "enter", enter)
    with pytest.raises(StoreError, match="is a link"):
        list(store.objects("a"))
    assert swapped


def test_the_root_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "named").symlink_to(tmp_path / "real")
    store = open_store(tmp_path / "named")
    store.put_new("a/b", b"1")
    assert store.get("a/b", max_bytes=1) == b"1"
    assert (tmp_path / "real" / "a" / "b").read_bytes() == b"1"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    num_open = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        store.put_new(f"a/{number}/c", b"1")
        with pytest.raises(KeyTakenError):
            store.put_new(f"a/{number}/c", b"2")
        list(store.objects(""))
        with pytest.raises(KeyAbsentError):
            store.get(f"b/{number}/c", max_bytes=1)
    assert len(os.listdir("/proc/self/fd")) == num_open


# ------------------------------------------------------------------ a folder of a group

KEYS = ("marker", "log/name/0", "log/name/1")
GROUP = stat.S_ISGID | stat.S_IRWXG


@pytest.fixture(params=[0o002, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def filled(root: Path, *folders: tuple[str, int]) -> dict[str, int]:
    """Mode bits of the group, and the setgid bit, by path, of a store that was written to.

    Args:
        folders: that exist before, with their modes.
    """
    for name, mode in folders:
        (root / name).mkdir()
        (root / name).chmod(mode)
    for key in KEYS:
        LocalStore(root / "team").put_new(key, b"x")
    found = {str(path.relative_to(root)): path.stat().st_mode & GROUP for path in root.rglob("*")}
    return {path: mode for path, mode in found.items() if "tmp/" not in path}


def test_a_second_user_of_the_group_may_read_and_write(tmp_path: Path, umask: int) -> None:
    """But for what the owner keeps to himself."""
    found = filled(tmp_path, ("team", 0o2775))
    folders = ("team", "team/tmp", "team/log", "team/log/name")
    assert {path: found.pop(path) for path in folders} == dict.fromkeys(folders, 0o2070)
    assert {path: mode & 0o2040 for path, mode in found.items()} == {
        f"team/{key}": 0o040 for key in KEYS
    }
    (tmp_path / "own").mkdir()
    found = filled(tmp_path / "own", ("team", 0o2775), ("team/log", 0o2700))
    assert found["team/log"] == stat.S_ISGID
    assert found["team/log/name"] == stat.S_ISGID | (0o070 & ~umask)


def test_elsewhere_the_umask_decides(tmp_path: Path, umask: int) -> None:
    found = filled(tmp_path, ("team", 0o775))
    assert found["team/log"] == 0o070 & ~umask
    assert found["team/marker"] == 0o060 & ~umask
    assert stat.S_IMODE((tmp_path / "team" / "marker").stat().st_mode) == 0o666 & ~umask
