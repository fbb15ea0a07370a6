"""A copy that dies before or after any call to its place: whole as far as it goes; it goes on."""

from __future__ import annotations

from contextlib import suppress

import pytest

from specctl.artifacts.signing import Trust
from specctl.registry import (
    Author,
    Copied,
    Note,
    Registry,
    StoreContent,
    copy_registry,
    copying,
    pin,
    promote,
    push,
)
from specctl.registry.fsck import fsck
from specctl.registry.garbage import mark, reachable, sweep
from specctl.registry.layout import LOGS, PINS
from specctl.registry.pins import release_pins
from specctl.registry.revising import write_settings
from specctl.stores import ObjectStore
from tests.registry.worlds import (
    GRACE_S,
    NAME,
    Dying,
    HandClock,
    Killed,
    package,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore

SETTINGS = b'{"trust_version":1,"keys":[],"require":[],"threshold":1}'
GC = Author("gc")


@pytest.fixture
def source() -> Registry:
    """Two names; one with versions that are aliased, pinned, collected, collected once pinned."""
    clock = HandClock()
    writer = writer_on(MemoryStore(), clock)
    for word in ("first", "released", "pinned", "last"):
        push(writer, package(word), NAME)
    push(writer, package("other"), "other")
    promote(writer, NAME, "prod", package("last").digest)
    for word in ("released", "pinned"):
        pin(writer, package(word).digest, reason="in the paper")
    release_pins(writer.registry, package("released").digest, actor="ann", reason="over")
    write_settings(writer.registry, SETTINGS, Author("owner"), note=Note())
    clock.now_s += 1
    assert len(mark(writer.registry, GC, retention_s=0.0)) == 4, "manifest and weights of two"
    clock.now_s += GRACE_S
    assert len(sweep(writer.registry, GC, grace_s=GRACE_S, retention_s=0.0)) == 4
    return writer.registry


def place() -> MemoryStore:
    store = MemoryStore()
    store.url = "copy"
    return store


def copied(source: Registry, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Copied:
    placed = ("copy", store, StoreContent(store))
    monkeypatch.setattr(copying, "place_registry", lambda _: placed)
    return copy_registry(source, "copy")


def histories(store: ObjectStore) -> dict[str, bytes]:
    """Pins, and logs but that of garbage, which is not copied."""
    keys = [one.key for prefix in (LOGS, PINS) for one in store.objects(prefix)]
    return {key: store.get(key, max_bytes=1 << 20) for key in keys if "/_gc/" not in key}


def check_whole(store: MemoryStore, source: Registry) -> None:
    copy = registry_on(store, source.clock, url="copy")
    assert [one for one in fsck(copy, Trust()) if one.is_damage] == []
    reachable(copy, 90 * 86_400.0, gone=copy.garbage_log().state.gone)  # its collector can work


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_copy_cut_off_anywhere_is_whole_as_far_as_it_goes(
    source: Registry, monkeypatch: pytest.MonkeyPatch, *, is_after: bool
) -> None:
    dying = Dying(place())
    copied(source, dying, monkeypatch)
    assert dying.num_calls > 50
    for dies_at in range(dying.num_calls):
        store = place()
        with suppress(Killed):
            copied(source, Dying(store, dies_at, is_after), monkeypatch)
        if "registry.json" in store.kept:
            check_whole(store, source)
        again = copied(source, store, monkeypatch)
        check_whole(store, source)
        assert histories(store) == histories(source.store)
        assert (again.num_artifacts, again.num_collected, again.num_pins) == (3, 2, 1)
