"""Registries by URL: a folder, `file:///folder` or `s3://bucket/prefix`; made, opened, copied."""

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
from specctl.errors import ArtifactError, RegistryError, UsageError
from specctl.records import Record, canonical_json, describe_violation
from specctl.registry.content import Content
from specctl.registry.log import LOGS, REGISTRY_VERSION, Log, Nonce, entry_key
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
"""Left by an attempt to make a registry, and present on every new file system."""


class Marker(Record):
    """`registry.json`."""

    registry_version: Literal[1]
    registry_id: Nonce
    created: UtcTime


@dataclass
class Registry:
    """An open registry; one object may be used again and again, by one thread at a time.

    Attributes:
        url: absolute folder or `s3://bucket/prefix`; cached references go by it.
        marker: its identity. content: its files by digest.
        memory: the histories that the user saw, which must go on; None for no user.
    """

    store: ObjectStore
    marker: Marker
    memory: Memory | None = None
    content: Content = field(init=False)
    _logs: dict[str, Log] = field(default_factory=dict, init=False)
    _is_probed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.url, self.content = self.store.url, Content(self.store)

    def check_store(self) -> None:
        """Refuses a store that ignores the condition of a put; tried once, before the first write.

        The way to it may have changed since the registry was made.
        """
        if not self._is_probed:
            probe(self.store)
            self._is_probed = True

    def log(self, name: str) -> Log:
        """The history of a name, read up to its end (E_NAME; E_LOG, also for one that lacks
        entries that the user saw)."""
        log = self._logs.get(name) or Log(self.store, self.marker.registry_id, name)
        if self.memory is None:
            log.refresh()
        else:  # recalled first: another process of the user may write on meanwhile
            newest = self.memory.recall(log.registry_id, name)
            log.refresh()
            self.memory.check(newest, log)
        self._logs[name] = log  # a refused one is read anew next time
        return log

    def note(self, log: Log) -> None:
        """Remembers a history as the user sees it now."""
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
        """Names that a listing shows, sorted; a listing may be stale. Folders without the form of
        a name are passed over; `verify` reports them."""
        found = []
        for segment in self.segments():
            with suppress(RegistryError):
                found.append(name_of(segment))
        return sorted(found)

    def remembered(self) -> set[str]:
        """Key segments of the names whose histories the user saw."""
        return set() if self.memory is None else self.memory.segments(self.marker.registry_id)

    def segments(self) -> list[str]:
        """Key segments below `log/`, of names or not, sorted."""
        return self.store.children(LOGS)


def open_registry(place: str | Path, memory: Memory | None = None) -> Registry:
    """The registry at a place; nothing but its marker is read yet.

    Args:
        memory: the histories that its user saw; None is that in the user's own cache.

    Raises:
        UsageError: a URL of another kind.
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
        RegistryError: E_EXISTS, for a registry and for a place that holds anything else.
        StoreError: the store cannot be written, or ignores the condition of a put.
    """
    registry_id = secrets.token_hex(16)
    made = Marker(registry_version=REGISTRY_VERSION, registry_id=registry_id, created=utc_now())
    return make_registry(open_store(place), made)


def make_registry(store: ObjectStore, marker: Marker) -> Registry:
    """Gives a new or empty place a marker (E_EXISTS); see `init_registry`."""
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
    """The marker of a place: E_NO_REGISTRY where it has none, E_VERSION for another form."""
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


# ------------------------------------------------------------------ copies


@dataclass(frozen=True)
class Copied:
    """The contents of a copy, new or there before: `num_names`, `num_entries` of their histories,
    `num_artifacts`."""

    num_names: int
    num_entries: int
    num_artifacts: int


def copy_registry(source: Registry, destination: Path | str) -> Copied:
    """Brings a place up to a registry; an empty place becomes a copy of it.

    Histories are copied byte for byte, so chains, signatures and the registry's identity hold in
    the copy. A history follows the artifacts that it names: an interrupted copy has fewer entries,
    never broken ones, and copying again completes it. Nothing in the destination is replaced.

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
                    "the copy was written to: its history has another entry than the source's",
                    hint="keep it, and copy to another place",
                ) from None
        num_entries += len(log.entries)
    return Copied(len(names), num_entries, len(artifacts))


def _open_copy(source: Registry, place: Path | str) -> Registry:
    """The place as a registry of the source's identity."""
    store = open_store(place)
    if f"{store.url}/".startswith(f"{source.url}/"):
        raise UsageError(f"{store.url} is the registry itself, or lies in it; copy it elsewhere")
    try:
        copy = Registry(store, read_marker(store))
    except RegistryError as error:
        if error.code != "E_NO_REGISTRY":
            raise
        copy = make_registry(store, source.marker)
    if copy.marker.registry_id != source.marker.registry_id:
        problem = "the place holds another registry"
        raise RegistryError("E_EXISTS", store.url, problem, hint="choose another place")
    copy.check_store()
    return copy
