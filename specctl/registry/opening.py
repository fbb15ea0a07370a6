"""Registries by URL: a folder, `file://`, `s3://`, or `oci://host/repository?log=<store>`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from specctl.artifacts.kinds import kind_of
from specctl.errors import RegistryError
from specctl.registry.content import Content
from specctl.registry.layout import LOGS, MARKER, TOP
from specctl.registry.room import PUBLISH_LIMIT_S, Registry, create_marker, read_marker
from specctl.registry.store_content import StoreContent
from specctl.registry.urls import parse_place
from specctl.stores import ObjectStore, open_store
from specctl.stores.local import TEMPORARY, LocalStore
from specctl.stores.probing import PROBE_KEY

_NOTHING = {PROBE_KEY.split("/")[0], TEMPORARY, "lost+found"}
"""What an attempt to make a registry leaves, and what every new file system has."""


def open_registry(place: str | Path) -> Registry:
    """The registry at a place; nothing but its marker is read yet.

    Raises:
        UsageError: a URL of another kind.
        RegistryError: E_NO_REGISTRY, E_VERSION.
        StoreError: the place cannot be read.
    """
    url, store, content = place_registry(place)
    return Registry(url, store, content, read_marker(store))


def is_registry(place: str | Path) -> bool:
    """Whether a place holds a registry, of whatever version.

    Raises:
        UsageError, StoreError: see `open_registry`.
    """
    try:
        open_registry(place)
    except RegistryError as error:
        return error.code != "E_NO_REGISTRY"
    return True


def init_registry(place: str | Path, *, publish_limit_s: int = PUBLISH_LIMIT_S) -> Registry:
    """Makes a place a registry.

    Args:
        publish_limit_s: the longest publication; garbage waits at least twice as long.

    Raises:
        RegistryError: E_EXISTS, for a registry and for what holds anything else.
        StoreError: the store cannot be written, or overwrites what it should refuse.
    """
    url, store, content = place_registry(place)
    refuse_occupied(store, content)
    return Registry(url, store, content, create_marker(store, publish_limit_s=publish_limit_s))


def refuse_occupied(
    store: ObjectStore, content: Content, own: Collection[str] = frozenset()
) -> None:
    """Refuses a place that holds something, and is no registry.

    An OCI repository may keep the artifacts of another registry, whose histories are elsewhere.
    To the new one all of them would be garbage.

    Args:
        own: artifacts that may be there, as they are this registry's.

    Raises:
        RegistryError: E_EXISTS.
    """
    names = _names_in(store) - _NOTHING
    if MARKER in names:
        return
    if LOGS in names and names <= TOP:
        lost = f"restore {MARKER} from a copy of this registry"
        raise _occupied(store.url, f"a registry that lost its {MARKER}", fix=lost)
    if names:
        raise _occupied(store.url, kind_of(names))
    held = next((one for one in content.held() if one not in own), None)
    if held is not None:
        raise _occupied(content.url, f"the artifacts of another registry, {held} for one")


def _occupied(
    url: str, found: str, fix: str = "choose another place: a registry has one of its own"
) -> RegistryError:
    return RegistryError(
        "E_EXISTS",
        url,
        expected="a new place or an empty one",
        found=found,
        fix=f"{fix}; nothing was touched",
    )


def _names_in(store: ObjectStore) -> set[str]:
    """What lies in a place, by the first part of its name."""
    if isinstance(store, LocalStore):
        return set(store.top())  # empty folders too
    return {one.key.split("/")[0] for one in store.objects("")}


def place_registry(place: str | Path) -> tuple[str, ObjectStore, Content]:
    """The registry's URL in its one form, its log store and its content.

    Raises:
        UsageError: see `parse_place`; or a package that the URL needs is missing.
    """
    found = parse_place(place)
    store = open_store(found.store)
    if found.oci is None:
        return found.url, store, StoreContent(store)
    from specctl.registry.oci import OciContent

    return found.url, store, OciContent(found.oci)
