"""A folder that others may write to: no link in it leads reads, writes or deletions elsewhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from specctl.errors import StoreError
from specctl.stores import KeyAbsentError, KeyTakenError, folders, open_store
from specctl.stores.local import LocalStore


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
        lambda: store.delete(f"{link}/thesis.tex"),
        lambda: list(store.objects(link)),
        lambda: list(store.objects(f"{link}/sub")),
    ):
        with pytest.raises(StoreError, match=r"the link .*remove it"):
            attempt()
    assert files_in(home) == ["sub/data.csv", "thesis.tex"]
    assert sorted(path.name for path in home.iterdir()) == ["sub", "thesis.tex"]
    assert link in [one.key for one in store.objects("")], "so that whoever checks can see it"
    store.delete(link)
    assert files_in(home) == ["sub/data.csv", "thesis.tex"]


def test_a_temporary_folder_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    home, root = outside(tmp_path), tmp_path / "store"
    root.mkdir()
    (root / "tmp").symlink_to(home)
    store = LocalStore(root)
    for attempt in (lambda: store.clear_temporary(60), lambda: store.put_new("a", b"1")):
        with pytest.raises(StoreError, match=r"the link .*tmp"):
            attempt()
    assert files_in(home) == ["sub/data.csv", "thesis.tex"]


def test_a_link_that_takes_a_folders_place_while_it_is_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a folder and its opening."""
    home, root = outside(tmp_path), tmp_path / "store"
    store, real, swapped = open_store(root), folders.enter, list[Path]()
    store.put_new("a/b/c", b"1")

    def enter(above: int, name: str) -> int:
        if name == "b" and not swapped:
            swapped.append((root / "a" / "b").rename(tmp_path / "moved"))
            (root / "a" / "b").symlink_to(home)
        return real(above, name)

    monkeypatch.setattr(folders, "enter", enter)
    with pytest.raises(StoreError, match="the link"):
        list(store.objects("a"))
    assert swapped
    with pytest.raises(StoreError, match="the link"):
        store.delete("a/b/thesis.tex")


def test_the_root_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "named").symlink_to(tmp_path / "real")
    store = open_store(tmp_path / "named")
    store.put_new("a/b", b"1")
    assert store.get("a/b", max_bytes=1) == b"1"
    assert (tmp_path / "real" / "a" / "b").read_bytes() == b"1"


def test_files_are_made_as_the_users_mask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        open_store(tmp_path / "store").put_new("a/b", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "store" / "a" / "b").stat().st_mode) == 0o640


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    num_open = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        store.put_new(f"a/{number}/c", b"1")
        with pytest.raises(KeyTakenError):
            store.put_new(f"a/{number}/c", b"2")
        list(store.objects(""))
        store.delete(f"a/{number}/c")
        with pytest.raises(KeyAbsentError):
            store.get(f"a/{number}/c", max_bytes=1)
        with pytest.raises(KeyAbsentError):
            store.get(f"b/{number}/c", max_bytes=1)
    assert len(os.listdir("/proc/self/fd")) == num_open
