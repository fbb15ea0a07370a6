"""A registry copied to another place: backup, mirror, move between backends, restore.

Histories are copied byte for byte, so chains, signatures and the registry's identity hold in the
copy, and readers go on where they were. What a history names is there before the history is: a
copy that was cut off shows less, never something broken, and going on is doing it again. Nothing
of the destination is replaced; where it went its own way, the copy is refused.

The log of garbage collection is not copied: the destination collects its own. What a copy brings is
held against that, as what anybody else publishes. And what the source's collection took is written
down in the destination's log, so that there, too, it is told from what was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from specctl.errors import ArtifactError, RegistryError, UsageError
from specctl.registry.content import OnBytes, known_parts, was_collected
from specctl.registry.entries import (
    MAX_DIGESTS,
    Action,
    Author,
    Logged,
    Mark,
    Sweep,
    Swept,
)
from specctl.registry.holding import busy, hold, tell_stored
from specctl.registry.layout import PINS, log_key, pin_folder
from specctl.registry.log import Log, commit
from specctl.registry.names import SETTINGS
from specctl.registry.opening import place_registry, refuse_occupied
from specctl.registry.pins import pinned_digests, pins
from specctl.registry.room import Registry, read_marker, write_marker
from specctl.registry.state import GarbageState, NameState
from specctl.stores import KeyTakenError, create, probe
from specctl.stores.creating import read

MAX_PIN_BYTES = 4096
COPIER = Author("specctl registry copy")
"""Who writes to the destination's log of garbage; its sweeps delete nothing."""


@dataclass(frozen=True)
class Copied:
    """What a copy holds now, whether it was there before or not.

    Attributes:
        num_collected: versions whose content garbage collection took at the source; their history
            is copied.
    """

    num_names: int
    num_entries: int
    num_artifacts: int
    num_collected: int
    num_pins: int


def copy_registry(
    source: Registry, destination: Path | str, *, on_bytes: OnBytes = lambda _: None
) -> Copied:
    """Brings a place up to a registry; an empty place becomes a copy of it.

    Raises:
        UsageError: the source itself, or a place in it, which would be damage to it.
        RegistryError: E_EXISTS where anything else is, E_LOG where a history went its own way,
            E_NAME for a history of the source that no name is written as, E_BUSY while the
            destination deletes what is copied, E_TIMEOUT for a name that takes longer than a
            publication there may.
        ArtifactError: the source's content is damaged or lost; the history that names it was not
            copied.
        StoreError: a place that cannot be used.
    """
    copying = Copying(source, _destination(source, destination), on_bytes)
    logs = [source.log(name) for name in source.all_names()]
    settings = source.settings_log()
    num_entries = _copy_entries(copying.copy, SETTINGS, settings.entries, lambda: None)
    kept = [copying.copy_name(log) for log in logs]
    artifacts = frozenset[str]().union(*kept)
    return Copied(
        num_names=len(logs),
        num_entries=num_entries + sum(len(log.entries) for log in logs),
        num_artifacts=len(artifacts),
        num_collected=sum(len(log.state.versions) for log in logs) - sum(map(len, kept)),
        num_pins=copying.copy_pins(),
    )


def _destination(source: Registry, place: Path | str) -> Registry:
    """The place as a registry of the source's identity."""
    url, store, content = place_registry(str(place))
    is_inside = store.url.startswith(f"{source.store.url}/")
    # Two that share an OCI repository would each collect what the other keeps there.
    if url == source.url or content.url == source.content.url or is_inside:
        raise UsageError(
            url,
            expected="another place, of OCI another repository too",
            found="a place inside of the registry"
            if is_inside
            else "the registry itself, or its OCI repository",
            fix="name the copy's place",
        )
    try:
        found = read_marker(store)
    except RegistryError as error:
        if error.code != "E_NO_REGISTRY":
            raise
        refuse_occupied(store, content, _versions(source))
        probe(store)
        found = write_marker(store, source.marker)
    if found.registry_id != source.marker.registry_id:
        raise RegistryError(
            "E_EXISTS",
            url,
            expected="an empty place, or a copy of this registry",
            found="another registry",
            fix="choose another place",
        )
    registry = Registry(url, store, content, found)
    registry.check_store()  # histories are copied without `commit`
    return registry


def _versions(source: Registry) -> set[str]:
    """What its histories name and its pins keep: an OCI repository may outlive its log."""
    named = (digest for name in source.all_names() for digest in source.log(name).state.versions)
    return pinned_digests(source).union(named)


@dataclass
class Copying:
    """What is copied, and where to.

    Attributes:
        pinned: what was pinned at the source when the copy began.
    """

    source: Registry
    copy: Registry
    on_bytes: OnBytes
    pinned: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.pinned = pinned_digests(self.source)

    def copy_name(self, log: Log[NameState]) -> frozenset[str]:
        """Copies the versions of a name, then its history, then the pins of these versions.

        All of it under one hold: the destination's collector may be at work, too.

        Returns:
            The versions that the source still has.
        """
        check = self._hold(log.state.versions)
        needed = self.pinned | {pointer.digest for pointer in log.state.aliases.values()}
        kept = frozenset(
            digest
            for digest in log.state.versions
            if self._copy_version(digest, f"{log.name}@{digest}", is_needed=digest in needed)
        )
        self._tell_stored(kept)
        _write_collected(self.copy, log.state.versions.keys() - kept)
        _copy_entries(self.copy, log.name, log.entries, check)
        for digest in kept:
            self._copy_pins_of(pin_folder(digest), check)
        return kept

    def copy_pins(self) -> int:
        """Copies the pins that are not there yet, of what no history names; counts those
        in force.
        """
        keys = [one.key for one in self.source.store.objects(PINS)]
        there = {one.key for one in self.copy.store.objects(PINS)}
        in_force = [one.pin.digest for one in pins(self.source) if not one.is_released]
        for folder in sorted({key.rpartition("/")[0] for key in keys if key not in there}):
            digest = f"sha256:{folder.rpartition('/')[2]}"
            check = self._hold([digest])
            if digest in in_force:
                self._copy_version(digest, f"the pinned {digest}", is_needed=True)
                self._tell_stored([digest])
            self._copy_pins_of(folder, check)
        return len(in_force)

    def _hold(self, digests: Iterable[str]) -> Callable[[], None]:
        """Holds at the destination what the source has of some versions."""
        parts = (known_parts(self.source.content, digest) for digest in digests)
        there = [some for some in parts if len(some) > 1]
        return hold(self.copy, frozenset[str]().union(*there), COPIER).check

    def _tell_stored(self, digests: Iterable[str]) -> None:
        """Says at the destination that what its collection took once is there again."""
        if self.copy.garbage_log().state.gone:
            parts = (self.source.content.parts(digest) for digest in digests)
            tell_stored(self.copy, frozenset[str]().union(*parts), COPIER)

    def _copy_version(self, digest: str, place: str, *, is_needed: bool) -> bool:
        """Copies a version; false where the source's garbage collection took it.

        Raises:
            ArtifactError: E_MISSING for one that is needed, or that no collection took.
        """
        source, copy = self.source, self.copy
        try:
            files = source.content.fetch(digest, self.on_bytes)
        except ArtifactError as error:
            if error.code != "E_MISSING":
                raise
            gone = source.garbage_log().state.gone
            if not is_needed and was_collected(source.content, digest, gone):
                return False
            raise _lost(place, error) from None
        copy.content.publish(digest, files, self.on_bytes)
        for envelope in source.content.signatures(digest):
            copy.content.add_signature(digest, envelope)
        return True

    def _copy_pins_of(self, folder: str, check: Callable[[], None]) -> None:
        # The end of a pin before the pin: one that is over keeps nothing, for no moment.
        for one in reversed(list(self.source.store.objects(folder))):
            check()
            pin = read(self.source.store, one.key, max_bytes=MAX_PIN_BYTES)
            create(self.copy.store, one.key, pin)


def _lost(place: str, error: ArtifactError) -> ArtifactError:
    return ArtifactError(
        "E_MISSING",
        place,
        expected="an artifact that is whole, or that garbage collection took",
        found=f"{error.found} at {error.field}",
        fix="run `specctl registry fsck` on the source, and push that artifact again",
    )


def _copy_entries(
    copy: Registry, name: str, entries: list[Logged], check: Callable[[], None]
) -> int:
    for generation, logged in enumerate(entries):
        key = log_key(name, generation)
        check()
        try:
            create(copy.store, key, logged.envelope)
        except KeyTakenError:
            raise RegistryError(
                "E_LOG",
                f"{copy.url}, {key}",
                expected="the same history as the source's",
                found="another entry",
                fix="the copy was written to; keep it, and copy to another place",
            ) from None
    return len(entries)


def _write_collected(copy: Registry, digests: set[str]) -> None:
    """Says in the destination's log of garbage that versions which a history names were collected.

    It stands before that history: without it they would be damage, and no garbage be collected.
    Nothing is deleted: they are not there. One that is there nevertheless, from an earlier copy,
    stays what it is.
    """
    absent = sorted(one for one in digests if known_parts(copy.content, one) == {one})
    for first in range(0, len(absent), MAX_DIGESTS):
        some = frozenset(absent[first : first + MAX_DIGESTS])
        log = copy.garbage_log()
        decide = partial(_next_step, log, some)
        while commit(log, decide, COPIER, now=copy.clock.utc) is not None:
            pass


def _next_step(
    log: Log[GarbageState], digests: frozenset[str], state: GarbageState
) -> Action | None:
    """Marks them, then declares them deleted; None when that is done."""
    if state.sweep_generation is not None:
        if log.entries[state.sweep_generation].entry.actor != COPIER.actor:
            raise busy(log.store.url, f"the sweep of generation {state.sweep_generation}")
        return Swept(sweep_generation=state.sweep_generation)
    left = digests - state.collected
    unmarked = left - state.marked.keys()
    if unmarked:
        return Mark(digests=tuple(sorted(unmarked)))
    return Sweep(digests=tuple(sorted(left))) if left else None
