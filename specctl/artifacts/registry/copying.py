"""A registry copied to another place: backup, mirror, move between backends, restore.

Histories are copied byte for byte, so chains, signatures and the registry's identity hold in the
copy, and readers go on where they were. What a history names is there before the history is: a
copy that was cut off shows less, never something broken, and going on is doing it again. Nothing
of the destination is replaced; where it went its own way, the copy is refused. Garbage collection
begins anew there: its log is not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specctl.artifacts.registry.content import OnBytes
from specctl.artifacts.registry.entries import Logged
from specctl.artifacts.registry.layout import PINS, log_key
from specctl.artifacts.registry.log import Log
from specctl.artifacts.registry.names import SETTINGS
from specctl.artifacts.registry.opening import place_registry
from specctl.artifacts.registry.room import Registry, read_marker, write_marker
from specctl.artifacts.registry.state import NameState
from specctl.errors import ArtifactError, RegistryError
from specctl.stores import KeyTakenError, ObjectStore, create, probe
from specctl.stores.creating import read

MAX_PIN_BYTES = 4096


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
        RegistryError: E_EXISTS where another registry is, E_LOG where a history went its own way.
        ArtifactError: the source's content is damaged, or an alias points to what is missing.
        StoreError: a place that cannot be used.
    """
    copy = _destination(source, destination)
    logs = [source.log(name) for name in source.names()]
    settings = source.settings_log()
    kept = [_copy_content(source, copy, log, on_bytes) for log in logs]
    num_entries = _copy_entries(copy, SETTINGS, settings.entries)
    num_entries += sum(_copy_entries(copy, log.name, log.entries) for log in logs)
    return Copied(
        num_names=len(logs),
        num_entries=num_entries,
        num_artifacts=len(frozenset[str]().union(*kept)),
        num_collected=sum(len(log.state.versions) for log in logs) - sum(map(len, kept)),
        num_pins=_copy_pins(source.store, copy.store),
    )


def _destination(source: Registry, place: Path | str) -> Registry:
    """The place as a registry of the source's identity."""
    url, store, content = place_registry(str(place))
    try:
        found = read_marker(store)
    except RegistryError as error:
        if error.code != "E_NO_REGISTRY":
            raise
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
    return Registry(url, store, content, found)


def _copy_content(
    source: Registry, copy: Registry, log: Log[NameState], on_bytes: OnBytes
) -> frozenset[str]:
    """Copies the versions of a name; returns those that the source still has."""
    aliased = {pointer.digest for pointer in log.state.aliases.values()}
    kept = set()
    for digest in log.state.versions:
        try:
            files = source.content.fetch(digest, on_bytes)
        except ArtifactError as error:
            if error.code != "E_MISSING" or digest in aliased:
                raise
            continue
        copy.content.publish(digest, files, on_bytes)
        for envelope in source.content.signatures(digest):
            copy.content.add_signature(digest, envelope)
        kept.add(digest)
    return frozenset(kept)


def _copy_entries(copy: Registry, name: str, entries: list[Logged]) -> int:
    for generation, logged in enumerate(entries):
        key = log_key(name, generation)
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


def _copy_pins(source: ObjectStore, copy: ObjectStore) -> int:
    pins = list(_pin_keys(source))
    for key in pins:
        create(copy, key, read(source, key, max_bytes=MAX_PIN_BYTES))
    return len(pins)


def _pin_keys(store: ObjectStore) -> Iterator[str]:
    yield from (one.key for one in store.objects(PINS))
