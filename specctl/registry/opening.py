"""Registries by URL: a folder, `file:///folder` or `s3://bucket/prefix`; made and opened.

The newest entry that a user saw of each history is kept in the user's cache, and a shortened or
replaced history is refused:

    histories/<registry_id>/<name>.json    generation and digest

Notes are kept by registry id, so a copy of a registry must continue the same history.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from specctl.artifacts.files import kind_of
from specctl.artifacts.manifest import Digest, UtcTime, utc_now
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, RegistryError
from specctl.records import Record, canonical_json, describe_violation
from specctl.registry.content import Content
from specctl.registry.log import LOGS, REGISTRY_VERSION, Generation, Log, Nonce
from specctl.registry.names import MARKER, name_of, segment_of, typed
from specctl.registry.userdirs import cache_home, read_note, write_note
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

_MARKER_BYTES = _NOTE_BYTES = 4096
_NOTHING = {PROBE_KEY.partition("/")[0], TEMPORARY, "lost+found"}
"""Entries of an empty place: traces of an interrupted `init`, and of a new file system."""


class Marker(Record):
    """`registry.json`."""

    registry_version: Literal[1]
    registry_id: Nonce
    created: UtcTime


class Newest(Record):
    """The newest entry that a user saw of a history."""

    generation: Generation
    digest: Digest


@dataclass
class Registry:
    """An open registry; each history is for one thread at a time.

    Attributes:
        url: absolute folder or `s3://bucket/prefix`, the key of cached references.
    """

    store: ObjectStore  # of all its objects
    marker: Marker  # its identity
    home: Callable[[], Path] | None = None  # the user's cache; None for no user
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
        newest = self._newest(name)  # before the history: other processes may add to both
        log.refresh()
        if newest is not None:
            self._check(newest, log)
        self._logs[name] = log  # a refused one is read again next time
        return log

    def _newest(self, name: str) -> Newest | None:
        if self.home is None:
            return None
        note = self._note(name)
        try:
            return read_note(note, Newest, max_bytes=_NOTE_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            problem = f"this note of the newest entry that you saw cannot be used: {error.strerror}"
            raise RegistryError("E_LOG", str(note), problem, hint="remove it") from None

    def _check(self, newest: Newest, log: Log) -> None:
        """Refuses a history that lacks the newest known entry (E_LOG)."""
        end = len(log.entries) - 1
        if newest.generation > end:
            found = f"this one ends at generation {end}" if end >= 0 else "it is gone"
        elif log.entries[newest.generation].digest != newest.digest:
            found = "this one has another entry there"
        else:
            return
        raise RegistryError(
            "E_LOG",
            f"{self.url}, {LOGS}/{segment_of(log.name)}",
            f"you saw a history up to generation {newest.generation}, but {found}",
            hint="restore the missing entries from a copy of the registry; to accept the loss, "
            f"remove {self._note(log.name)}",
        )

    def note(self, log: Log) -> None:
        """Remembers the newest entry of a history for the user, unless a newer one is known."""
        end, known = len(log.entries) - 1, self._newest(log.name)
        if self.home is None or end < 0 or (known is not None and known.generation >= end):
            return
        newest = Newest(generation=end, digest=log.entries[end].digest)
        write_note(self._note(log.name), newest, self.home())

    def _note(self, name: str) -> Path:
        return self._notes() / f"{segment_of(name)}.json"

    def _notes(self) -> Path:
        assert self.home is not None
        return self.home() / "histories" / self.marker.registry_id

    def known_log(self, name: str) -> Log:
        """`log` of a name that exists (else E_UNKNOWN_NAME)."""
        log = self.log(name)
        if not log.entries:
            raise RegistryError(
                "E_UNKNOWN_NAME",
                f"{self.url}, {name}",
                "nothing was ever published under this name",
                hint=f"{typed(self.url, 'list')} shows the names",
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
        return set() if self.home is None else {one.stem for one in self._notes().glob("*.json")}

    def segments(self) -> list[str]:
        """Key segments below `log/`, valid names or not, sorted."""
        return self.store.children(LOGS)


def open_registry(place: str | Path) -> Registry:
    """Opens the registry at a place; only its marker is read.

    Raises:
        UsageError: an unsupported URL.
        RegistryError: E_NO_REGISTRY, E_VERSION.
        StoreError: the place cannot be read.
    """
    store = open_store(place)
    return Registry(store, read_marker(store), cache_home)


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
            hint=f"check the place, or make it one: {typed(store.url, 'init')}",
        ) from None
    except (ArtifactError, ValidationError, ObjectTooLargeError) as error:
        problem = describe_violation(error) if isinstance(error, ValidationError) else error.message
        raise RegistryError(
            "E_VERSION",
            f"{store.url}, {MARKER}",
            f"not the marker of registry version {REGISTRY_VERSION}: {problem}",
            hint="use the version of specctl that wrote it, or restore it from a copy",
        ) from None
