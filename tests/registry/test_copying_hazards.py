"""A copier or a store that fails in a bad moment: nothing is lost by it, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from specctl.artifacts.facts import utc_now, utc_seconds
from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError, StoreError, UsageError
from specctl.registry import (
    Author,
    Note,
    Registry,
    StoreContent,
    Writer,
    copy_registry,
    copying,
    init_registry,
    open_registry,
    pin,
    push,
    read_package,
)
from specctl.registry.collecting import collect
from specctl.registry.entries import Publish
from specctl.registry.fsck import fsck
from specctl.registry.garbage import end_dead_sweep, mark
from specctl.registry.holding import hold
from specctl.registry.layout import log_key, manifest_key
from specctl.registry.log import commit
from specctl.registry.names import GARBAGE
from specctl.registry.pins import pins, release_pins
from specctl.registry.revising import write_settings
from specctl.stores import open_store
from specctl.stores.probing import PROBE_KEY
from tests.registry.copies import GOLDEN, collected, histories, source
from tests.registry.worlds import NAME, HandClock, Killed, Wrapped, registry_on, writer_on
from tests.stores.memory import MemoryStore

__all__ = ["source"]
SETTINGS = b'{"trust_version":1,"keys":[],"require":[],"threshold":1}'


class DiesInItsSweep(Wrapped):
    """The store of a copier who dies when it has said that it deletes."""

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        done = act()
        if word == "put" and key == log_key(GARBAGE, 1):
            raise Killed
        return done


def die_copying(store: MemoryStore, clock: HandClock, digest: str) -> None:
    with pytest.raises(Killed):
        copying._write_collected(registry_on(DiesInItsSweep(store), clock), {digest})


def test_a_copier_that_died_takes_nothing_of_a_push() -> None:
    """It wrote down that a version was collected, which somebody is bringing right now."""
    store, clock, package = MemoryStore(), HandClock(), read_package(GOLDEN / "hetero")
    writer = writer_on(store, clock)
    registry = writer.registry
    held = hold(registry, package.parts, writer.author)
    die_copying(store, clock, package.digest)
    registry.content.publish(package.digest, package.files, lambda _: None)
    held.check()
    action = Publish(digest=package.digest)
    assert commit(registry.log(NAME), lambda _: action, writer.author, now=clock.utc)
    assert end_dead_sweep(registry, writer.author) == [package.digest]
    assert registry.content.fetch(package.digest, lambda _: None) == dict(package.files)


def test_a_push_waits_for_a_copier_that_is_in_its_way() -> None:
    store, clock, package = MemoryStore(), HandClock(), read_package(GOLDEN / "hetero")
    writer, sizes = writer_on(store, clock), list[int]()

    def on_bytes(size_bytes: int) -> None:
        if not sizes:
            die_copying(store, clock, package.digest)
        sizes.append(size_bytes)

    with pytest.raises(RegistryError, match="E_BUSY"):
        push(writer, package, NAME, on_bytes=on_bytes)
    end_dead_sweep(writer.registry, writer.author)
    push(writer, package, NAME)
    assert writer.registry.garbage_log().state.gone == set()
    assert list(fsck(writer.registry, Trust())) == []


@dataclass
class Ignoring(Wrapped):
    """A store that ignores the condition of a put."""

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        if word == "put":
            self.inner.delete(key)
        return act()


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "copied before"])
def test_a_place_that_ignores_the_condition_gets_no_copy(
    source: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    if is_there:
        copy_registry(source, tmp_path / "copy")
    write_settings(source, SETTINGS, Author("root"), note=Note())
    store = Ignoring(open_store(tmp_path / "copy"))
    before = {one.key for one in store.objects("")}
    placed = (store.url, store, StoreContent(store))
    monkeypatch.setattr(copying, "place_registry", lambda _: placed)
    with pytest.raises(StoreError, match="If-None-Match"):
        copy_registry(source, tmp_path / "copy")
    assert {one.key for one in store.objects("")} - before <= {PROBE_KEY}


def test_nobody_commits_where_the_condition_is_ignored(source: Registry) -> None:
    """A registry that was well once; since then something stands before the store."""
    registry = registry_on(Ignoring(source.store))
    package = read_package(GOLDEN / "hetero")
    before = histories(source)
    for write in (
        lambda: push(Writer(registry, Author("bob"), Trust.load()), package, NAME),
        lambda: mark(registry, Author("gc"), retention_s=0.0),
        lambda: write_settings(registry, SETTINGS, Author("bob"), note=Note()),
    ):
        with pytest.raises(StoreError, match="If-None-Match"):
            write()
    assert histories(source) == before
    assert package.digest not in set(source.content.held()), "nothing was transferred"


def test_what_the_destination_collected_is_there_again(source: Registry, tmp_path: Path) -> None:
    """And can be lost from then on, which must not be called collected."""
    copy_registry(source, tmp_path / "copy")
    gone = collected(open_registry(tmp_path / "copy"))
    assert gone in open_registry(tmp_path / "copy").garbage_log().state.gone
    copy_registry(source, tmp_path / "copy")
    assert open_registry(tmp_path / "copy").garbage_log().state.gone == set()
    (tmp_path / "copy" / manifest_key(gone)).unlink()
    found = {one.code for one in fsck(open_registry(tmp_path / "copy"), Trust())}
    assert "E_MISSING" in found
    assert "W_COLLECTED" not in found


def test_a_copy_goes_nowhere_where_anything_else_is(source: Registry, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "paper.tex").touch()
    with pytest.raises(RegistryError, match="E_EXISTS"):
        copy_registry(source, thesis)
    assert [path.name for path in thesis.iterdir()] == ["paper.tex"]
    with pytest.raises(UsageError, match="the registry itself"):
        copy_registry(source, source.url)
    with pytest.raises(UsageError, match="inside of the registry"):
        copy_registry(source, f"{source.url}/backup")
    assert list(fsck(source, Trust())) == []


def test_a_clock_that_is_ahead_excuses_no_grace_that_is_too_short(source: Registry) -> None:
    source.clock = HandClock(utc_seconds(utc_now()) + 3 * 3600)
    for resume in (False, True):
        with pytest.raises(UsageError, match="--grace"):
            collect(
                source,
                Author("gc"),
                is_marking=False,
                is_sweeping=True,
                grace_s=-1,
                retention_s=0,
                resume=resume,
            )


def test_a_registry_that_lost_its_marker_is_told_as_that(source: Registry) -> None:
    """What the advice for an absent one, `init`, led to was the advice to go elsewhere."""
    Path(source.url, "registry.json").unlink()
    with pytest.raises(RegistryError, match=r"E_EXISTS.*lost its registry.json.*from a copy"):
        init_registry(source.url)


def test_what_is_pinned_during_a_copy_comes_whole(
    source: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a name that is newer than the copy: its pin alone would stop the copy's collector."""
    writer, package = Writer(source, Author("bob"), Trust.load()), read_package(GOLDEN / "hetero")
    real = copying.Copying.copy_pins

    def late(copied: copying.Copying) -> int:
        push(writer, package, "late")
        pin(writer, package.digest, reason="meanwhile")
        return real(copied)

    monkeypatch.setattr(copying.Copying, "copy_pins", late)
    assert copy_registry(source, tmp_path / "copy").num_pins == 2
    copy = open_registry(tmp_path / "copy")
    assert {one.code for one in fsck(copy, Trust()) if one.is_damage} == set()


def test_pins_come_with_the_name_that_they_are_of(
    source: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the very end: a copy that was cut off keeps what its source keeps."""

    def cut(_: copying.Copying) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying.Copying, "copy_pins", cut)
    with pytest.raises(KeyboardInterrupt):
        copy_registry(source, tmp_path / "copy")
    assert list(pins(open_registry(tmp_path / "copy"))) == list(pins(source)) != []


def test_pins_that_were_released_are_copied_and_not_counted(
    source: Registry, tmp_path: Path
) -> None:
    prod = source.log(NAME).state.aliases["prod"].digest
    assert copy_registry(source, tmp_path / "copy").num_pins == 1
    release_pins(source, prod, actor="ann", reason="over")
    assert copy_registry(source, tmp_path / "copy").num_pins == 0
    assert [one.is_released for one in pins(open_registry(tmp_path / "copy"))] == [True]
