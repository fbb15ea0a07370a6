"""A registry: its content, its logs, and the marker that makes a place one."""

from __future__ import annotations

import math
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from specctl.artifacts.facts import UtcTime, utc_now
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError, RegistryError, UsageError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json, describe_violation
from specctl.registry.content import Content
from specctl.registry.layout import LOGS, MARKER, REGISTRY_VERSION, Nonce
from specctl.registry.log import Log
from specctl.registry.names import GARBAGE, RESERVED, SETTINGS, name_of_segment
from specctl.registry.state import GarbageState, NameState, SettingsState
from specctl.stores import KeyAbsentError, KeyTakenError, ObjectStore, create, probe
from specctl.stores.creating import MAX_CREATE_S, elapsed_s, read
from specctl.stores.interface import ObjectTooLargeError

PUBLISH_LIMIT_S = 3600
"""The longest publication, seconds; what takes longer starts over. Half the shortest grace."""
MIN_PUBLISH_LIMIT_S = math.ceil(MAX_CREATE_S)
"""The request that commits is sent within the limit, and may take so long itself; the grace is two
limits, so both together must fit in it."""
MAX_PUBLISH_LIMIT_S = 7 * 24 * 3600
"""So that garbage can be collected within two weeks: a limit is never changed."""
_MARKER_BYTES = 4096


class Marker(Record):
    """`registry.json`."""

    registry_version: Literal[1]
    registry_id: Nonce
    created: UtcTime
    publish_limit_s: Annotated[int, Field(ge=1)]


class Clock:
    """The time: for entries, and for how long something took."""

    def utc(self) -> str:
        """`2026-01-31T12:00:00Z`."""
        return utc_now()

    def elapsed_s(self) -> float:
        """Seconds since some fixed moment; no one sets this clock back.

        Where the system can tell, the time that the machine was suspended counts: meanwhile
        collectors on other machines went on.
        """
        return elapsed_s()


@dataclass
class Registry:
    """An open registry; one object may be used again and again, by one thread at a time.

    Attributes:
        url: in its one form (`urls`); floors and cached references go by it.
        store: holds the logs, the pins and the marker.
    """

    url: str
    store: ObjectStore
    content: Content
    marker: Marker
    clock: Clock = field(default_factory=Clock)
    _logs: dict[str, Log[Any]] = field(default_factory=dict)
    _is_probed: bool = False

    def check_store(self) -> None:
        """Stands before the first entry: the store must refuse taken keys. Asked once.

        That it did when the registry was made says little of the way to it now.

        Raises:
            StoreError: it does not, or cannot be written.
        """
        if not self._is_probed:
            probe(self.store)
            self._is_probed = True

    def log(self, name: str) -> Log[NameState]:
        """The history of a name, read anew up to its end.

        Raises:
            RegistryError: E_LOG, see `Log.refresh`; E_NAME.
        """
        return self._refreshed(name, NameState)

    def known_log(self, name: str) -> Log[NameState]:
        """`log` of a name that exists.

        Raises:
            RegistryError: E_UNKNOWN_NAME; see also `log`.
        """
        log = self.log(name)
        if not log.entries:
            raise RegistryError(
                "E_UNKNOWN_NAME",
                f"{self.url}, {name}",
                expected="a name with a history",
                found="none",
                fix="`specctl registry list` shows what there is",
            )
        return log

    def any_log(self, name: str) -> Log[Any]:
        """The history of a name, or of the registry itself (`_settings`, `_gc`)."""
        if name == SETTINGS:
            return self.settings_log()
        return self.garbage_log() if name == GARBAGE else self.known_log(name)

    def settings_log(self) -> Log[SettingsState]:
        """The settings of the registry, read anew."""
        return self._refreshed(SETTINGS, SettingsState)

    def garbage_log(self) -> Log[GarbageState]:
        """What garbage collection did, read anew."""
        return self._refreshed(GARBAGE, GarbageState)

    def _refreshed(self, name: str, state: type[Any]) -> Log[Any]:
        log = self._logs.get(name)
        if log is None:
            registry_id = self.marker.registry_id
            log = Log(self.store, registry_id, name, state(), ready=self.check_store)
        log.refresh()
        self._logs[name] = log  # only one that could be read: a refused one is read anew
        return log

    def names(self) -> list[str]:
        """Names that a listing shows, sorted; what is written like no name is passed over.

        A listing may be stale. Whoever must not miss a name takes `all_names`.
        """
        found = []
        for segment in self.segments():
            with suppress(RegistryError):  # nobody can ask for it by name; fsck reports it
                found.append(name_of_segment(segment))
        return sorted(set(found) - set(RESERVED))

    def all_names(self) -> list[str]:
        """The same, for those whose work is wrong if one is passed over (gc, copying).

        Raises:
            RegistryError: E_NAME for a log that no name is written as.
        """
        for segment in self.segments():
            try:
                name_of_segment(segment)
            except RegistryError as error:
                raise RegistryError(
                    "E_NAME",
                    f"{self.store.url}, {LOGS}/{segment}",
                    expected="histories of names, and nothing else",
                    found=error.found,
                    fix="run `specctl registry fsck`, and move what is no history away",
                ) from None
        return self.names()

    def segments(self) -> list[str]:
        """Key segments below `log/`, names or not, sorted; no history is looked into."""
        return self.store.children(LOGS)


def _check_publish_limit(publish_limit_s: int) -> None:
    if not MIN_PUBLISH_LIMIT_S <= publish_limit_s <= MAX_PUBLISH_LIMIT_S:
        raise UsageError(
            "--publish-limit",
            expected=f"at least {MIN_PUBLISH_LIMIT_S} s, the longest that one request may take, "
            f"and at most {MAX_PUBLISH_LIMIT_S} s, a week: garbage waits twice as long",
            found=f"{publish_limit_s} s",
            fix="choose one between; the default suits most",
        )


def create_marker(store: ObjectStore, *, publish_limit_s: int = PUBLISH_LIMIT_S) -> Marker:
    """Makes a place a registry, once the store has shown that it refuses taken keys.

    Raises:
        UsageError: a limit that the last request of a publication could outlast, or for which
            garbage would wait for ever.
        RegistryError: E_EXISTS.
        StoreError: the store cannot be written, or ignores the condition of a put.
    """
    _check_publish_limit(publish_limit_s)
    probe(store)
    marker = Marker(
        registry_version=REGISTRY_VERSION,
        registry_id=secrets.token_hex(16),
        created=utc_now(),
        publish_limit_s=publish_limit_s,
    )
    return write_marker(store, marker)


def write_marker(store: ObjectStore, marker: Marker) -> Marker:
    """Gives a place a marker.

    Raises:
        RegistryError: E_EXISTS.
    """
    try:
        create(store, MARKER, canonical_json(marker.model_dump(mode="json")).encode())
    except KeyTakenError:
        raise RegistryError(
            "E_EXISTS",
            store.url,
            expected="a place that is no registry yet",
            found=f"{MARKER}, of one",
            fix="use it as it is, or choose another place",
        ) from None
    return marker


def read_marker(store: ObjectStore) -> Marker:
    """The marker of a place.

    Raises:
        RegistryError: E_NO_REGISTRY for a place without one, E_VERSION for one that this version
            does not read.
    """
    try:
        data = read(store, MARKER, max_bytes=_MARKER_BYTES)
        parse_strict(data)
        return Marker.model_validate_json(data)
    except KeyAbsentError:
        raise RegistryError(
            "E_NO_REGISTRY",
            store.url,
            expected=f"a registry, with {MARKER}",
            found="none",
            fix="check the place, or `specctl registry init` it",
        ) from None
    except (ArtifactError, ValidationError, ObjectTooLargeError) as error:
        found = describe_violation(error) if isinstance(error, ValidationError) else error.found
        raise RegistryError(
            "E_VERSION",
            f"{store.url}, {MARKER}",
            expected=f"the marker of registry version {REGISTRY_VERSION}",
            found=found,
            fix="use the version of specctl that wrote it; if it was cut or altered, restore it "
            "from a copy of this registry",
        ) from None
