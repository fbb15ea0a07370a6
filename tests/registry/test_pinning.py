"""Pins: one that took too long is not written, one that was released is so for everybody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specctl.errors import ArtifactError, RegistryError
from specctl.registry import pin, push
from specctl.registry.pins import pins, release_pins
from tests.registry.worlds import (
    LIMIT_S,
    NAME,
    HandClock,
    Stale,
    Wrapped,
    package,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore


class Slow(Wrapped):
    """Reading a file's bytes takes as long as a whole publication may."""

    clock: HandClock

    def step(self, word: str, key: str, act: object) -> object:
        if word == "get" and key.startswith("blobs/"):
            self.clock.now_s += LIMIT_S
        return super().step(word, key, act)  # type: ignore[arg-type]


def all_pins(store: MemoryStore) -> Iterator[object]:
    yield from pins(registry_on(store))


def test_a_slow_pin_is_stopped_before_it_is_written() -> None:
    store, clock = MemoryStore(), HandClock()
    push(writer_on(store, clock), package("one"), NAME)
    slow = Slow(store)
    slow.clock = clock
    with pytest.raises(RegistryError, match="E_TIMEOUT"):
        pin(writer_on(slow, clock), package("one").digest, reason="slow")
    assert list(all_pins(store)) == []
    pin(writer_on(store, clock), package("one").digest, reason="quick")
    assert len(list(all_pins(store))) == 1


def test_a_pin_is_released_once_whatever_a_listing_says() -> None:
    store = MemoryStore()
    writer, digest = writer_on(store), package("one").digest
    push(writer, package("one"), NAME)
    pin(writer, digest, reason="mine")
    stale = registry_on(Stale(store, seen=list(store.objects(""))), writer.registry.clock)
    assert release_pins(writer.registry, digest, actor="ann", reason="done") == 1
    with pytest.raises(RegistryError, match="E_NOT_PINNED"):
        release_pins(stale, digest, actor="bob", reason="done")


def test_a_pin_s_reason_holds_no_secret() -> None:
    """Neither pins nor histories are ever rewritten."""
    store = MemoryStore()
    writer, digest = writer_on(store), package("one").digest
    push(writer, package("one"), NAME)
    with pytest.raises(ArtifactError, match=r"E_PRIVACY pin\.reason") as refused:
        pin(writer, digest, reason="see ghp_" + "b" * 36)
    assert "bbb" not in str(refused.value)
    assert list(all_pins(store)) == []
