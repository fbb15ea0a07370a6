"""A registry copied to another place: backup, mirror, restore between folders and buckets.

Histories are copied byte for byte, so chains, signatures and the registry's identity hold in the
copy. A history follows the artifacts that it names: an interrupted copy has fewer entries, never
broken ones, and copying again completes it. Nothing in the destination is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specctl.errors import RegistryError, UsageError
from specctl.registry.log import entry_key
from specctl.registry.opening import Registry, make_registry, read_marker
from specctl.stores import KeyTakenError, create, open_store


@dataclass(frozen=True)
class Copied:
    """The contents of a copy, new or there before."""

    num_names: int
    num_entries: int
    num_artifacts: int


def copy_registry(source: Registry, destination: Path | str) -> Copied:
    """Brings a place up to a registry; an empty place becomes a copy of it.

    Raises:
        UsageError: the source itself, or a place in it.
        RegistryError: E_EXISTS where anything else is, E_LOG where a history of the copy differs.
        ArtifactError: the source's content is damaged; the history that names it was not copied.
        StoreError: a place that cannot be used.
    """
    copy = _open_copy(source, destination)
    artifacts, num_entries = set[str](), 0
    names = source.names()
    for name in names:
        log = source.log(name)
        for digest in log.state.versions.keys() - artifacts:
            files = source.content.fetch(digest)
            copy.content.publish(digest, files, source.content.signatures(digest))
            artifacts.add(digest)
        for generation, logged in enumerate(log.entries):
            key = entry_key(name, generation)
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
        num_entries += len(log.entries)
    return Copied(len(names), num_entries, len(artifacts))


def _open_copy(source: Registry, place: Path | str) -> Registry:
    """The place as a registry of the source's identity."""
    store = open_store(place)
    if f"{store.url}/".startswith(f"{source.url}/"):
        raise UsageError(
            store.url,
            expected="another place",
            found="the registry itself, or a place in it",
            fix="name the copy's place",
        )
    try:
        copy = Registry(store.url, store, read_marker(store))
    except RegistryError as error:
        if error.code != "E_NO_REGISTRY":
            raise
        copy = make_registry(store, source.marker)
    if copy.marker.registry_id != source.marker.registry_id:
        raise RegistryError(
            "E_EXISTS",
            store.url,
            expected="an empty place, or a copy of this registry",
            found="another registry",
            fix="choose another place",
        )
    copy.check_store()
    return copy
