"""One history that cannot be read, in whatever way, hides no other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from specctl.artifacts.signing import MAX_ENVELOPE_BYTES, SigningKey, Trust
from specctl.errors import StoreError
from specctl.registry import (
    Author,
    Package,
    Writer,
    init_registry,
    open_registry,
    promote,
    push,
)
from specctl.registry.entries import Note
from specctl.registry.fsck import fsck
from specctl.registry.garbage import mark
from specctl.registry.views import candidates, name_rows
from specctl.stores import folders
from specctl.stores.interface import TransientError, UnreadableError
from specctl.stores.local import LocalStore
from tests.registry.pulls import real, trusting
from tests.registry.worlds import NAME, HandClock, package, registry_on, writer_on
from tests.stores.memory import MemoryStore

__all__ = ["real"]  # a fixture


@pytest.fixture
def folder(tmp_path: Path, real: tuple[Package, Package]) -> Path:
    writer = writer_on(LocalStore(tmp_path / "registry"))
    push(writer, real[0], NAME)
    promote(writer, NAME, "prod", real[0].digest)
    return tmp_path / "registry"


@pytest.mark.parametrize("what", ["a link", "too large", "not JSON"])
def test_a_history_that_cannot_be_read_hides_no_other(folder: Path, what: str) -> None:
    entry = folder / "log" / "evil" / "000000000000.json"
    entry.parent.mkdir()
    if what == "a link":
        entry.symlink_to("/etc/hostname")
    else:
        entry.write_bytes(b"x" * (MAX_ENVELOPE_BYTES + 1 if what == "too large" else 9))
    registry = registry_on(LocalStore(folder))
    evil, good = name_rows(registry)
    assert (evil["name"], good["name"], good["num_versions"]) == ("evil", NAME, 1)
    assert "log/evil/000000000000.json" in evil["error"]
    told: list[str] = []
    assert [one.reference for one in candidates(registry, Trust(), told.append)] == [f"{NAME}@prod"]
    [line] = told
    assert "log/evil/000000000000.json" in line


def test_an_alias_that_is_refused_hides_no_other_of_its_digest(
    folder: Path, real: tuple[Package, Package]
) -> None:
    """Who searches is to find the one that they may use, by each name that it has."""
    clock = HandClock()
    writer = writer_on(LocalStore(folder), clock)
    clock.now_s += 60
    soon = clock.utc()
    clock.now_s -= 60
    promote(writer, NAME, "weekly", real[0].digest, note=Note(expires=soon))
    clock.now_s += 61
    found = list(candidates(registry_on(LocalStore(folder), clock), Trust(), pytest.fail))
    refused = {one.reference: one.refusal is not None for one in found}
    assert refused == {f"{NAME}@prod": False, f"{NAME}@weekly": True}


def test_a_manifest_that_cannot_be_read_hides_no_other(
    folder: Path, real: tuple[Package, Package]
) -> None:
    registry = registry_on(LocalStore(folder))
    push(writer_on(LocalStore(folder)), real[1], "other")
    hexadecimal = real[0].digest.removeprefix("sha256:")
    manifest = folder / "manifests" / "sha256" / f"{hexadecimal}.json"
    manifest.unlink()
    manifest.symlink_to("/etc/hostname")
    told: list[str] = []
    assert [one.digest for one in candidates(registry, Trust(), told.append)] == [real[1].digest]
    assert f"{NAME}@prod" in told[0]


def test_a_store_that_does_not_answer_is_no_history_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it holds is not known: the list is not shown as if it were whole."""
    monkeypatch.setattr("specctl.stores.creating.FIRST_WAIT_S", 0.0)
    store = MemoryStore()
    writer = writer_on(store)
    push(writer, package("one"), NAME)
    get = store.get

    def silent(key: str, **options: int) -> bytes:
        if key.startswith(f"log/{NAME.split('+')[0]}"):
            raise TransientError(key, expected="an answer", found="none", fix="try again")
        return get(key, **options)

    monkeypatch.setattr(store, "get", silent)
    for read in (name_rows, lambda found: list(candidates(found, Trust(), pytest.fail))):
        with pytest.raises(StoreError):
            read(registry_on(store))


def test_a_folder_that_is_closed_to_a_reader_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a teammate with a umask of 077."""
    registry = init_registry(tmp_path)
    for name in ("aa", "bb", "cc"):
        push(Writer(registry, Author("ann"), Trust()), package(name), name)
    real = folders.enter

    def enter(above: int, name: str) -> int:
        if name == "bb":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(above, name)

    monkeypatch.setattr(folders, "enter", enter)
    reader = open_registry(tmp_path)
    rows = name_rows(reader)
    assert [row["name"] for row in rows] == ["aa", "bb", "cc"]
    assert [str(tmp_path / "log" / "bb") in row.get("error", "") for row in rows] == [0, 1, 0]
    told = [one.found for one in fsck(reader, Trust()) if one.is_damage]
    assert told
    assert all("log/bb" in one for one in told)
    with pytest.raises(UnreadableError, match="log/bb"):
        mark(reader, Author("gc"), retention_s=0.0)


def test_settings_that_nobody_may_rely_on_are_told_with_each_match(folder: Path) -> None:
    """A root is trusted, and no settings are signed by it: nothing of this registry is loaded."""
    root = trusting(SigningKey.generate(), "root").model_copy(update={"require": ()})
    [found] = candidates(registry_on(LocalStore(folder)), Trust(root), pytest.fail)
    assert found.refusal is not None
    assert found.refusal.startswith("E_SIG: expected settings that a root signed")
