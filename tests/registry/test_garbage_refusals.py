"""What garbage collection must not do: leave its root, guess, break its log, trust a clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specctl.artifacts.signing import Trust
from specctl.errors import ArtifactError, RegistryError, StoreError, UsageError
from specctl.registry import Author, Note, Package, holding, pin, promote, push
from specctl.registry.collecting import collect
from specctl.registry.entries import Mark, Sweep
from specctl.registry.fsck import fsck
from specctl.registry.garbage import end_dead_sweep, mark, sweep
from specctl.registry.layout import manifest_key, signature_folder
from specctl.registry.room import MIN_PUBLISH_LIMIT_S, Clock, create_marker
from specctl.stores.creating import MAX_CREATE_S
from specctl.stores.local import LocalStore
from tests.registry.races import NEW, OLD, RETENTION_S, World
from tests.registry.worlds import (
    GRACE_S,
    LIMIT_S,
    NAME,
    HandClock,
    package,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore


@pytest.fixture
def world() -> World:
    return World()


def test_a_sweep_that_another_has_ended_stops(world: World) -> None:
    """It was thought dead; whoever needs what it has not deleted may hold that again."""
    marked, done = world.mark(), list[list[str]]()
    world.clock.now_s += GRACE_S
    slow = world.writer

    def meanwhile() -> None:
        if not done:
            done.append(world.end_dead_sweep())

    swept = sweep(
        slow.registry,
        slow.author,
        grace_s=GRACE_S,
        retention_s=RETENTION_S,
        on_removed=meanwhile,
    )
    assert len(swept) == 1
    assert [[*swept, *left] for left in done] == [marked]
    log = registry_on(world.store, world.clock).garbage_log()
    assert [one.entry.action.kind for one in log.entries] == ["mark", "sweep", "swept"]
    push(world.writer, package("three"), NAME)
    assert world.mark() == marked[1:]


def in_use(world: World) -> None:
    """What an alias points to."""


def in_use_by_a_pin(world: World) -> None:
    pin(world.writer, OLD.digest, reason="mine")


@pytest.mark.parametrize(("use", "used"), [(in_use, NEW), (in_use_by_a_pin, OLD)])
def test_a_sweep_that_anybody_could_write_deletes_nothing(
    world: World, use: Callable[[World], None], used: Package
) -> None:
    """Whoever may push may write to `_gc`, and its entries are not signed."""
    use(world)
    log, eve = world.writer.registry.garbage_log(), Author("eve")
    for action in (Mark(digests=(used.digest,)), Sweep(digests=(used.digest,))):
        log.append(action, eve, created="2020-01-01T00:00:00Z", note=Note())
    registry, author = world.writer.registry, world.writer.author
    done = collect(
        registry,
        author,
        is_marking=True,
        is_sweeping=True,
        resume=True,
        grace_s=GRACE_S,
        retention_s=RETENTION_S,
    )
    assert done[:2] == [("left", [used.digest]), ("swept", [])]
    assert used.digest not in done[2][1]
    assert world.holds(used.digest)
    assert not [one for one in fsck(registry, Trust()) if one.is_damage]


def test_only_a_sweep_can_be_resumed(world: World) -> None:
    with pytest.raises(UsageError, match="--sweep"):
        collect(
            world.writer.registry,
            world.writer.author,
            is_marking=True,
            is_sweeping=False,
            resume=True,
            grace_s=GRACE_S,
            retention_s=RETENTION_S,
        )


def lose_prod(world: World) -> str:
    return NEW.digest


def lose_pinned(world: World) -> str:
    pin(world.writer, OLD.digest, reason="mine")
    return OLD.digest


def lose_newest(world: World) -> str:
    promote(world.writer, NAME, "prod", OLD.digest)
    return NEW.digest


@pytest.mark.parametrize("lose", [lose_prod, lose_pinned, lose_newest])
def test_where_a_manifest_is_lost_nothing_is_called_garbage(
    world: World, lose: Callable[[World], str]
) -> None:
    """What it was made of is not known any more; after the mark, and before it."""
    third = package("third", shared="other")
    world.writer.registry.content.publish(third.digest, third.files, lambda _: None)
    assert third.digest in world.mark()
    digest = lose(world)
    lost = {key: world.store.kept.pop(key) for key in [manifest_key(digest)]}
    world.clock.now_s += GRACE_S
    before = dict(world.store.kept)
    for attempt in (world.mark, world.sweep):
        with pytest.raises(ArtifactError, match=f"E_MISSING .*{digest}.*fsck"):
            attempt()
    assert world.store.kept == before
    world.store.kept |= lost
    assert third.digest in world.sweep()
    assert world.holds(digest)


def test_what_was_collected_is_not_lost(world: World) -> None:
    """With a longer retention than before, an entry names what is gone."""
    world.mark()
    world.clock.now_s += GRACE_S
    assert OLD.digest in world.sweep()
    writer = world.writer
    assert mark(writer.registry, writer.author, retention_s=1e9) == []


@pytest.mark.parametrize(
    "key",
    ["log/README.md/x", "log/.DS_Store", "log/A/000000000000.json", "pins/a b", "pins/x.json"],
)
def test_what_cannot_be_read_stops_a_collection(world: World, key: str) -> None:
    """It might be what keeps something; readers of names pass it over."""
    world.mark()
    world.clock.now_s += GRACE_S
    world.store.kept[key] = b""
    before = dict(world.store.kept)
    for attempt in (world.mark, world.sweep):
        with pytest.raises(RegistryError, match=r"E_NAME|E_LOG"):
            attempt()
    assert world.store.kept == before
    assert world.writer.registry.names() == [NAME]


def test_a_sweep_follows_no_link_out_of_the_registry(tmp_path: Path) -> None:
    """Whoever may write to a shared folder put a link where signatures go."""
    clock, store = HandClock(), LocalStore(tmp_path / "registry")
    writer = writer_on(store, clock)
    for one in (OLD, NEW):
        push(writer, one, NAME)
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    (home / "sub" / f"{'0' * 64}.json").write_text("a letter")
    (home / "thesis.tex").write_text("a thesis")
    link = tmp_path / "registry" / signature_folder(OLD.digest)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home)
    clock.now_s += 2 * RETENTION_S
    assert OLD.digest in mark(writer.registry, writer.author, retention_s=RETENTION_S)
    clock.now_s += GRACE_S
    with pytest.raises(StoreError, match="the link"):
        sweep(writer.registry, writer.author, grace_s=GRACE_S, retention_s=RETENTION_S)
    assert sorted(path.name for path in home.rglob("*")) == [
        f"{'0' * 64}.json",
        "sub",
        "thesis.tex",
    ]
    link.unlink()
    assert end_dead_sweep(writer.registry, writer.author)
    assert mark(writer.registry, writer.author, retention_s=RETENTION_S)
    clock.now_s += GRACE_S
    assert sweep(writer.registry, writer.author, grace_s=GRACE_S, retention_s=RETENTION_S)


def test_a_sweep_leaves_what_is_no_signature_and_ends(tmp_path: Path) -> None:
    clock, store = HandClock(), LocalStore(tmp_path / "registry")
    writer = writer_on(store, clock)
    for one in (OLD, NEW):
        push(writer, one, NAME)
    folder = tmp_path / "registry" / signature_folder(OLD.digest)
    folder.mkdir(parents=True)
    (folder / "a b.json").touch()
    clock.now_s += 2 * RETENTION_S
    mark(writer.registry, writer.author, retention_s=RETENTION_S)
    clock.now_s += GRACE_S
    assert sweep(writer.registry, writer.author, grace_s=GRACE_S, retention_s=RETENTION_S)
    assert writer.registry.garbage_log().state.sweep_generation is None


def test_what_dead_writers_left_unfinished_is_cleared(tmp_path: Path) -> None:
    writer = writer_on(LocalStore(tmp_path))
    push(writer, OLD, NAME)
    old, young = (tmp_path / "tmp" / (digit * 32) for digit in "01")
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - GRACE_S - 1,) * 2)
    collected = partial(collect, writer.registry, writer.author, grace_s=GRACE_S, retention_s=1e9)
    assert collected(is_marking=True, is_sweeping=False) == [("marked", [])]
    cleared = ("cleared", [f"tmp/{old.name}"])
    assert collected(is_marking=False, is_sweeping=True) == [("swept", []), cleared]
    assert collected(is_marking=False, is_sweeping=True) == [("swept", [])]
    assert young.exists()


class Suspended(HandClock):
    """A machine that slept: its own clock stood still meanwhile."""

    def elapsed_s(self) -> float:
        return 0.0


class SetBack(HandClock):
    """A machine whose UTC was set back meanwhile."""

    def utc(self) -> str:
        return HandClock(1.7e9).utc()


@pytest.mark.parametrize("clock", [Suspended(), SetBack()], ids=["suspended", "set back"])
def test_no_clock_that_stands_still_lengthens_the_limit(clock: HandClock) -> None:
    held = holding.Hold.now(registry_on(MemoryStore(), clock))
    clock.now_s += LIMIT_S
    held.check()
    clock.now_s += 1
    with pytest.raises(RegistryError, match="E_TIMEOUT"):
        held.check()


def test_time_asleep_counts() -> None:
    """CLOCK_MONOTONIC stands still in a machine that is suspended."""
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    assert Clock().elapsed_s() - time.monotonic() == pytest.approx(asleep, abs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "clock_gettime", lambda clock: 100.0 * clock)
        assert Clock().elapsed_s() == 100 * time.CLOCK_BOOTTIME


def test_a_limit_that_one_request_could_outlast_is_refused() -> None:
    store = MemoryStore()
    with pytest.raises(UsageError, match="--publish-limit"):
        create_marker(store, publish_limit_s=MIN_PUBLISH_LIMIT_S - 1)
    assert store.kept == {}
    create_marker(store, publish_limit_s=MIN_PUBLISH_LIMIT_S)
    assert MIN_PUBLISH_LIMIT_S >= MAX_CREATE_S


def test_a_publication_may_need_more_digests_than_one_entry_holds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = world.mark()
    assert len(marked) == 2
    monkeypatch.setattr(holding, "MAX_DIGESTS", 1)
    push(world.writer, OLD, NAME)
    assert registry_on(world.store).garbage_log().state.marked == {}
