"""Users who race the collector of garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

from specctl.errors import ArtifactError, RegistryError
from specctl.registry import Note, Writer, pin, promote, push
from specctl.registry.copying import Copying
from specctl.registry.garbage import end_dead_sweep, mark, sweep
from tests.registry.interleaving import COLLECTOR, USER, Turned, Turns, run, schedules
from tests.registry.worlds import (
    GRACE_S,
    NAME,
    HandClock,
    package,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore

OLD, NEW = package("old"), package("new")
RETENTION_S = 1000.0
User = Callable[[Writer], object]


class World:
    """A version that nothing reaches any more, and one that is in use."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), HandClock()
        kept, self.clock.now_s = _begun()
        self.store.kept = dict(kept)

    @classmethod
    def made(cls) -> World:
        """The same, from nothing."""
        self = cls.__new__(cls)
        self.store, self.clock = MemoryStore(), HandClock()
        writer = self.writer
        for one in (OLD, NEW):
            push(writer, one, NAME)
            promote(writer, NAME, "prod", one.digest)
            self.clock.now_s += 2 * RETENTION_S
        return self

    @property
    def writer(self) -> Writer:
        return writer_on(self.store, self.clock)

    def mark(self, writer: Writer | None = None) -> list[str]:
        chosen = writer or self.writer
        return mark(chosen.registry, chosen.author, retention_s=RETENTION_S)

    def sweep(self, writer: Writer | None = None) -> list[str]:
        chosen = writer or self.writer
        return sweep(chosen.registry, chosen.author, grace_s=GRACE_S, retention_s=RETENTION_S)

    def end_dead_sweep(self) -> list[str]:
        return end_dead_sweep(self.writer.registry, self.writer.author)

    def holds(self, digest: str) -> bool:
        with suppress(ArtifactError):
            registry_on(self.store, self.clock).content.fetch(digest, lambda _: None)
            return True
        return False


@cache
def _begun() -> tuple[dict[str, bytes], float]:
    made = World.made()
    return made.store.kept, made.clock.now_s


def use_by_push(writer: Writer) -> None:
    push(writer, OLD, NAME)


def use_by_promotion(writer: Writer) -> None:
    promote(writer, NAME, "prod", OLD.digest, note=Note("back"))


def use_by_pin(writer: Writer) -> None:
    pin(writer, OLD.digest, reason="mine")


def use_by_copy(writer: Writer) -> None:
    """A mirror is brought up to a registry that still has the old version, and points to it."""
    source = World().writer
    promote(source, NAME, "prod", OLD.digest)
    copying = Copying(source.registry, writer.registry, lambda _: None)
    assert OLD.digest in copying.copy_name(source.registry.log(NAME))


USERS = (use_by_push, use_by_promotion, use_by_pin, use_by_copy)


def concerns(word: str, key: str) -> bool:
    """Calls of one actor that can have another result, or effect, by a call of the other."""
    if word == "list":
        return key in ("pins", "log/_gc") or key.startswith(("log/q", "manifests", "signatures"))
    if key.startswith(("blobs/", "manifests/")):
        return any(digest[7:] in key for digest in OLD.parts - NEW.parts)
    return key.startswith("log/") or (key.startswith("pins/") and word == "put")


class Race:
    """One user of the old version, one collector; `marks_first`: the mark is there already."""

    def __init__(self, user: User, turns: Turns | None, *, marks_first: bool) -> None:
        self.world, self.user, self.turns = World(), user, turns
        self.marks_first = marks_first
        self.refused = ""
        if marks_first:
            self.world.mark()
            self.world.clock.now_s += GRACE_S
        self.stores = [
            Turned(self.world.store, turns, actor, concerns) for actor in (USER, COLLECTOR)
        ]
        self.writers = [writer_on(store, self.world.clock) for store in self.stores]

    def use(self) -> None:
        try:
            self.user(self.writers[USER])
        except (RegistryError, ArtifactError) as error:
            self.refused = error.code

    def collect(self) -> None:
        writer = self.writers[COLLECTOR]
        if not self.marks_first:
            self.world.mark(writer)
            if self.turns is not None:
                self.turns.jump(self.world.clock, GRACE_S)
            else:
                self.world.clock.now_s += GRACE_S
        self.world.sweep(writer)

    def is_lost(self) -> bool:
        """Whether somebody was told that the old version is in use, and it is not whole."""
        return not self.refused and not self.world.holds(OLD.digest)

    def num_calls(self) -> tuple[int, int]:
        """Of the user alone, then of the collector alone."""
        alone = Race(self.user, None, marks_first=self.marks_first)
        alone.use()
        other = Race(self.user, None, marks_first=self.marks_first)
        other.collect()
        return alone.stores[USER].num_calls, other.stores[COLLECTOR].num_calls


def races(user: User, *, marks_first: bool, num_passes: int) -> Iterator[Race]:
    """Every race with up to so many passes of the turn, after it was run."""
    calls = Race(user, None, marks_first=marks_first).num_calls()
    for turns in schedules(calls, num_passes):
        race = Race(user, turns, marks_first=marks_first)
        run(turns, (race.use, race.collect))
        yield race
