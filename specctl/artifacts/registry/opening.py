"""Registries by URL: a folder, `file://`, `s3://`, or `oci://host/repository?log=<store>`."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from specctl.artifacts.kinds import kind_of
from specctl.artifacts.registry.content import Content
from specctl.artifacts.registry.layout import MARKER
from specctl.artifacts.registry.names import Reference, parse_reference
from specctl.artifacts.registry.room import PUBLISH_LIMIT_S, Registry, create_marker, read_marker
from specctl.artifacts.registry.store_content import StoreContent
from specctl.errors import RegistryError, UsageError
from specctl.stores import ObjectStore, is_store_url, open_store
from specctl.stores.local import TEMPORARY, LocalStore
from specctl.stores.opening import refuse_secrets
from specctl.stores.probing import PROBE_KEY

SCHEMES = ("file", "s3", "oci")
_NOTHING = {PROBE_KEY.split("/")[0], TEMPORARY, "lost+found"}
"""What an attempt to make a registry leaves, and what every new file system has."""


def open_registry(place: str | Path) -> Registry:
    """The registry at a place; nothing but its marker is read yet.

    Raises:
        UsageError: a URL of another kind.
        RegistryError: E_NO_REGISTRY, E_VERSION.
        StoreError: the place cannot be read.
    """
    url, store, content = place_registry(str(place))
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
    url, store, content = place_registry(str(place))
    _refuse_occupied(store)
    return Registry(url, store, content, create_marker(store, publish_limit_s=publish_limit_s))


def _refuse_occupied(store: ObjectStore) -> None:
    """Refuses a place that holds something, and is no registry."""
    names = _names_in(store) - _NOTHING
    if names and MARKER not in names:
        raise RegistryError(
            "E_EXISTS",
            store.url,
            expected="a new place or an empty one",
            found=kind_of(names),
            fix="choose another place: a registry has one of its own; nothing was touched",
        )


def _names_in(store: ObjectStore) -> set[str]:
    """What lies in a place, by the first part of its name."""
    if isinstance(store, LocalStore):
        return set(store.top())  # empty folders too
    return {one.key.split("/")[0] for one in store.objects("")}


def registry_url(place: str | Path) -> str:
    """The URL that a registry's floors and cached references go by; nothing is opened."""
    text = str(place)
    refuse_secrets(text)
    return text if text.startswith("oci://") else open_store(text).url


def place_registry(place: str) -> tuple[str, ObjectStore, Content]:
    """The registry's URL, made absolute, its log store and its content.

    Raises:
        UsageError: a URL of another kind, or one that is mistyped.
    """
    refuse_secrets(place)
    parts = urlsplit(place)
    _check_scheme(place, parts.scheme)
    if parts.scheme != "oci":
        store = open_store(place)
        return store.url, store, StoreContent(store)
    logs = parse_qs(parts.query).get("log", [])
    if len(logs) != 1:
        raise UsageError(
            f"registry {place!r}",
            expected="oci://host/repository?log=<folder or s3://bucket/prefix>",
            found=f"{len(logs)} logs",
            fix="name one store for the logs: OCI tags move, so aliases cannot live there",
        )
    from specctl.artifacts.registry.oci import OciContent

    return place, open_store(logs[0]), OciContent(place.partition("?")[0])


def _check_scheme(place: str, scheme: str) -> None:
    """Refuses a URL that no registry has, by all that a registry may have."""
    if is_store_url(place) and scheme not in SCHEMES:
        found, fix = f"scheme {scheme!r}", "correct the URL"
    elif scheme in SCHEMES and not is_store_url(place):
        slashes = "///" if scheme == "file" else "//"
        meant = f"{scheme}:{slashes}{place.partition(':')[2].lstrip('/')}"
        found, fix = "no // behind the colon", f"write {meant}, or a folder as ./{place}"
    else:
        return
    raise UsageError(
        f"registry {place!r}"[:200],
        expected="a folder, file:///folder, s3://bucket/prefix or oci://host/repository?log=STORE",
        found=found,
        fix=fix,
    )


def split_reference(text: str) -> tuple[str, Reference] | None:
    """A registry's place and a reference in it, from `PLACE/REFERENCE`; None for other text.

    The last segment is the reference; the part before it is a URL, or a folder with a
    `registry.json`. Of OCI, the query goes last: `oci://host/repo/REFERENCE?log=...`.
    """
    path, mark, query = text.partition("?") if text.startswith("oci://") else (text, "", "")
    place, slash, last = path.rpartition("/")
    if not slash or not (is_store_url(text) or os.path.exists(f"{place}/{MARKER}")):
        return None
    try:
        return place + mark + query, parse_reference(last)
    except RegistryError:
        return None
