"""Registries by URL: a folder, `file:///folder` or `s3://bucket/prefix`; made and opened."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from specctl.artifacts.files import kind_of
from specctl.artifacts.manifest import UtcTime, utc_now
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, RegistryError
from specctl.records import Record, canonical_json, describe_violation
from specctl.registry.content import Content
from specctl.registry.log import LOGS, REGISTRY_VERSION, Log, Nonce
from specctl.registry.memory import Memory
from specctl.registry.names import MARKER, name_of
from specctl.stores import (
    PROBE_KEY,
    TEMPORARY,
    KeyAbsentError,
    KeyTakenError,
    ObjectStore,
    ObjectTooLargeError,
    create,
    open_store,
    probe,
    read,
)

_MARKER_BYTES = 4096
_NOTHING = {PROBE_KEY.partition("/")[0], TEMPORARY, "lost+found"}
"""Entries of an empty place: traces of an interrupted `init`, and of a new file system."""


class Marker(Record):
    """`registry.json`."""

    registry_version: Literal[1]
    registry_id: Nonce
    created: UtcTime


@dataclass
class Registry:
    """An open registry; each history is for one thread at a time.

    Attributes:
        url: absolute folder or `s3://bucket/prefix`, the key of cached references.
    """

    store: ObjectStore  # of all its objects
    marker: Marker  # its identity
    memory: Memory | None = None  # the histories that the user saw; None for no user
    content: Content = field(init=False)  # files by digest
    _logs: dict[str, Log] = field(default_factory=dict, init=False)
    _is_probed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.url, self.content = self.store.url, Content(self.store)

    def check_store(self) -> None:
        """Refuses a store without conditional puts; probed once, before the first write.

        An endpoint or a proxy may have changed since the registry was made.
        """
        if not self._is_probed:
            probe(self.store)
            self._is_probed = True

    def log(self, name: str) -> Log:
        """The history of a name, read to its end (E_NAME; E_LOG, also if entries that the user saw
        are missing)."""
        log = self._logs.get(name) or Log(self.store, self.marker.registry_id, name)
        if self.memory is None:
            log.refresh()
        else:
            newest = self.memory.recall(log.registry_id, name)
            log.refresh()
            self.memory.check(newest, log)
        self._logs[name] = log  # a refused one is read again next time
        return log

    def note(self, log: Log) -> None:
        """Remembers the newest entry of a history for the user."""
        if self.memory is not None:
            self.memory.note(log)

    def known_log(self, name: str) -> Log:
        """`log` of a name that exists (else E_UNKNOWN_NAME)."""
        log = self.log(name)
        if not log.entries:
            raise RegistryError(
                "E_UNKNOWN_NAME",
                f"{self.url}, {name}",
                "nothing was ever published under this name",
                hint="`specctl registry list` shows the names",
            )
        return log

    def names(self) -> list[str]:
        """Listed names, sorted; the listing may be stale. Other folders are skipped; `verify`
        reports them."""
        found = []
        for segment in self.segments():
            with suppress(RegistryError):
                found.append(name_of(segment))
        return sorted(found)

    def remembered(self) -> set[str]:
        """Key segments of the names whose histories the user saw."""
        return set() if self.memory is None else self.memory.segments(self.marker.registry_id)

    def segments(self) -> list[str]:
        """Key segments below `log/`, valid names or not, sorted."""
        return self.store.children(LOGS)


def open_registry(place: str | Path, memory: Memory | None = None) -> Registry:
    """Opens the registry at a place; only its marker is read.

    Args:
        memory: the histories that the user saw; None for those in the user's cache.

    Raises:
        UsageError: an unsupported URL.
        RegistryError: E_NO_REGISTRY, E_VERSION.
        StoreError: the place cannot be read.
    """
    store = open_store(place)
    return Registry(store, read_marker(store), memory or Memory())


def is_registry(place: str | Path) -> bool:
    """Whether a place holds a registry, of any version."""
    try:
        open_registry(place)
    except RegistryError as error:
        return error.code != "E_NO_REGISTRY"
    return True


def init_registry(place: str | Path) -> Registry:
    """Makes a place a registry.

    Raises:
        RegistryError: E_EXISTS if the place is not empty.
        StoreError: the store cannot be written, or lacks conditional puts.
    """
    registry_id = secrets.token_hex(16)
    made = Marker(registry_version=REGISTRY_VERSION, registry_id=registry_id, created=utc_now())
    return make_registry(open_store(place), made)


def make_registry(store: ObjectStore, marker: Marker) -> Registry:
    """Writes a marker to a new or empty place (else E_EXISTS); see `init_registry`."""
    names = set(store.children("")) - _NOTHING
    if names and MARKER not in names:
        problem = f"the place is not empty: it holds {kind_of(names)}"
        fix = "choose another place"
        if {LOGS, "manifests"} <= names:
            problem = f"the place holds a registry that lost its {MARKER}"
            fix = f"restore {MARKER} from a copy"
        raise RegistryError("E_EXISTS", store.url, problem, hint=f"{fix}; nothing was touched")
    probe(store)
    try:
        create(store, MARKER, canonical_json(marker.model_dump(mode="json")).encode())
    except KeyTakenError:
        raise RegistryError(
            "E_EXISTS",
            store.url,
            f"the place is a registry already: it has a {MARKER}",
            hint="use it as it is, or choose another place",
        ) from None
    return Registry(store, marker)


def read_marker(store: ObjectStore) -> Marker:
    """The marker of a place: E_NO_REGISTRY without one, E_VERSION for an invalid one."""
    try:
        data = read(store, MARKER, max_bytes=_MARKER_BYTES)
        parse_strict(data)
        return Marker.model_validate_json(data)
    except KeyAbsentError:
        raise RegistryError(
            "E_NO_REGISTRY",
            store.url,
            f"this is no registry: it has no {MARKER}",
            hint="check the place, or `specctl registry init` it",
        ) from None
    except (ArtifactError, ValidationError, ObjectTooLargeError) as error:
        problem = describe_violation(error) if isinstance(error, ValidationError) else error.message
        raise RegistryError(
            "E_VERSION",
            f"{store.url}, {MARKER}",
            f"not the marker of registry version {REGISTRY_VERSION}: {problem}",
            hint="use the version of specctl that wrote it, or restore it from a copy",
        ) from None
