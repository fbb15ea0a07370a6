"""A folder that a group shares: what is made in it is the group's too, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from specctl.stores.local import LocalStore

KEYS = ("marker", "log/name/0", "log/name/1")


@pytest.fixture(params=[0o002, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def shared_folder(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def rights(root: Path) -> dict[str, int]:
    """Mode bits of the group, and the setgid bit, by path."""
    kept = stat.S_ISGID | stat.S_IRWXG
    found = {str(path.relative_to(root)): path.stat().st_mode & kept for path in root.rglob("*")}
    return {path: mode for path, mode in found.items() if not path.startswith("tmp/")}


@pytest.mark.usefixtures("umask")
def test_a_second_user_of_the_group_may_read_and_write(tmp_path: Path) -> None:
    team = shared_folder(tmp_path / "team", 0o2775)
    for key in KEYS:
        LocalStore(team / "registry").put_new(key, b"x")
    files = {f"registry/{key}": 0o040 for key in KEYS}
    folders = dict.fromkeys(
        ("registry", "registry/tmp", "registry/log", "registry/log/name"), 0o2070
    )
    found = rights(team)
    assert {path: mode & 0o2040 for path, mode in found.items() if path in files} == files
    assert {path: mode for path, mode in found.items() if path not in files} == folders


def test_what_the_owner_keeps_for_himself_stays_so(tmp_path: Path, umask: int) -> None:
    team = shared_folder(tmp_path / "team", 0o2775)
    shared_folder(team / "log", 0o2700)
    LocalStore(team).put_new("log/name/0", b"x")
    found = rights(team)
    assert found["log"] == stat.S_ISGID
    assert found["log/name"] == stat.S_ISGID | (0o070 & ~umask)


def test_elsewhere_the_umask_decides(tmp_path: Path, umask: int) -> None:
    alone = shared_folder(tmp_path / "alone", 0o775)
    for key in KEYS:
        LocalStore(alone).put_new(key, b"x")
    assert rights(alone)["log"] == 0o070 & ~umask
    assert rights(alone)["marker"] == 0o060 & ~umask
