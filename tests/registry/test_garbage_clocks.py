"""When the grace of a mark is over, whoever says what time it is; and what a dead sweep left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from specctl.registry import Author, Note, pin, promote, push
from specctl.registry.collecting import collect
from specctl.registry.entries import Mark, Sweep
from specctl.registry.garbage import mark, sweep
from specctl.registry.log import commit
from specctl.stores import StoredObject
from specctl.stores.probing import PROBE_KEY
from tests.registry.races import NEW, OLD, RETENTION_S, World
from tests.registry.worlds import (
    GRACE_S,
    NAME,
    HandClock,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore


@pytest.fixture
def world() -> World:
    return World()


class Dated(MemoryStore):
    """Knows when each object was put, as real stores do."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self.clock, self.put_s = clock, dict[str, float]()

    def put_new(self, key: str, data: bytes) -> None:
        super().put_new(key, data)
        self.put_s[key] = self.clock.now_s

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        for one in super().objects(prefix):
            yield replace(one, modified_s=self.put_s[one.key])


def test_a_mark_that_says_it_is_old_has_its_grace_like_any() -> None:
    """Whoever may push may write it, of what somebody is just publishing."""
    clock = HandClock()
    writer = writer_on(Dated(clock), clock)
    push(writer, OLD, NAME)
    push(writer, NEW, NAME)
    early = HandClock(clock.now_s - RETENTION_S)
    clock.now_s += 2 * RETENTION_S
    forged = Mark(digests=(OLD.digest,))
    log = writer.registry.garbage_log()
    assert commit(log, lambda _: forged, writer.author, now=early.utc)
    sweeping = partial(sweep, writer.registry, writer.author, grace_s=GRACE_S, retention_s=0)
    assert sweeping() == []
    clock.now_s += GRACE_S
    assert sweeping() != []


@pytest.mark.parametrize("is_pinned", [False, True], ids=["promoted", "pinned"])
def test_what_a_dead_sweep_left_counts_as_there_once_it_is_used(
    world: World, *, is_pinned: bool
) -> None:
    """Else `fsck` would call it collected when it is lost one day."""
    log = world.writer.registry.garbage_log()
    for action in (Mark(digests=(OLD.digest,)), Sweep(digests=(OLD.digest,))):
        log.append(action, Author("gc"), created=world.clock.utc(), note=Note())
    world.end_dead_sweep()
    assert registry_on(world.store).garbage_log().state.collected == {OLD.digest}
    if is_pinned:
        pin(world.writer, OLD.digest, reason="mine")
    else:
        promote(world.writer, NAME, "canary", OLD.digest)
    assert registry_on(world.store).garbage_log().state.collected == set()


def test_a_collector_whose_clock_is_ahead_gives_the_whole_grace() -> None:
    """The mark is another's, by a clock that was right; meanwhile somebody publishes."""
    clock = HandClock()
    store = Dated(clock)
    writer = writer_on(store, clock)
    push(writer, OLD, NAME)
    push(writer, NEW, NAME)
    clock.now_s += 2 * RETENTION_S
    assert mark(writer.registry, writer.author, retention_s=RETENTION_S)

    def swept() -> list[str]:
        ahead = registry_on(store, HandClock(clock.now_s + 2 * GRACE_S))
        times = {"grace_s": GRACE_S, "retention_s": RETENTION_S}
        done = collect(ahead, Author("gc"), is_marking=False, is_sweeping=True, **times)
        return dict(done)["swept"]

    assert swept() == []
    clock.now_s += GRACE_S
    assert OLD.digest in swept()
    assert [one.key for one in store.objects("probe")] == [PROBE_KEY], "nothing is left"
