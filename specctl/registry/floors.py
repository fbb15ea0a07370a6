"""How far a user has seen each log: nothing older is believed again.

A floor is the generation of a log and the digest of the entry there. It is raised only after all
checks of a pull have passed: a floor written before them could lock a user onto a bad log
(tough, CVE-2025-2888). Floors are kept by exclusive creation too, one file a generation, so that
two processes of a user never lower one. Only its user takes one away, with a reason that is kept.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specctl.artifacts.facts import Digest, Name, UtcTime, utc_now
from specctl.artifacts.manifest import digest_of
from specctl.artifacts.userdirs import state_home
from specctl.errors import RegistryError
from specctl.policy.base import Record
from specctl.policy.parse import canonical_json
from specctl.registry.entries import Generation, Logged, unfit
from specctl.registry.layout import hex_of
from specctl.registry.log import Log
from specctl.registry.names import log_segment, name_of_segment, parse_digest
from specctl.registry.room import Registry
from specctl.stores import KeyAbsentError, KeyTakenError, create
from specctl.stores.interface import ObjectTooLargeError
from specctl.stores.local import LocalStore

FORGOTTEN = "forgotten"
_FLOOR = re.compile(r"[0-9a-f]{64}/[^/]+/([0-9]{12})\.json")
_FLOOR_BYTES, _FORGOTTEN_BYTES = 80, 1 << 16


@dataclass(frozen=True)
class Floor:
    """How far a log was seen; digest of the entry there."""

    name: str
    generation: int
    digest: str


class Forgotten(Record):
    """Floors that their user took away, and why."""

    url: str
    name: str
    generations: tuple[Generation, ...]
    digests: tuple[Digest, ...]
    reason: Name
    forgotten: UtcTime


class Floors:
    """Floors of one user, by the registry's URL and the name.

    Args:
        root: the folder that keeps them; None is the user's own.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._store = LocalStore(root or state_home() / "floors")

    def check(self, registry: Registry, log: Log[Any]) -> None:
        """Refuses a log that does not hold what was seen of it before.

        Raises:
            RegistryError: E_ROLLBACK for an older history, or for another one.
        """
        for generation, digest in self._seen(registry.url, log.name):
            found = log.entries[generation].digest if generation < len(log.entries) else "none"
            if found != digest:
                raise _rolled_back(registry, log.name, generation, digest, found)

    def raise_to(self, registry: Registry, newest: Logged) -> None:
        """Remembers the newest entry of a log, once everything passed every check.

        Raises:
            RegistryError: E_ROLLBACK where another process saw another entry there.
        """
        url, name, raised = registry.url, newest.entry.name, newest.entry.generation
        if any(generation > raised for generation, _ in self._seen(url, name)):
            return  # seen further before, by another trust or by another process
        key = self._key(url, name, raised)
        try:
            create(self._store, key, newest.digest.encode())
        except KeyTakenError:
            seen = self._digest_at(key)
            raise _rolled_back(registry, name, raised, seen, newest.digest) from None
        for generation, _ in self._seen(url, name):
            if generation < raised:
                self._store.delete(self._key(url, name, generation))

    def known(self, url: str) -> list[Floor]:
        """The floors of a registry by its URL, by name.

        Raises:
            RegistryError: E_ROLLBACK for a file that holds no floor.
        """
        place = f"{_registry(url)}/"
        keys = [one.key for one in self._store.objects(_registry(url))]
        names = sorted({name_of_segment(key.removeprefix(place).split("/")[0]) for key in keys})
        return [Floor(name, *floor) for name in names for floor in self._seen(url, name)]

    def forget(self, url: str, name: str, reason: str) -> list[Floor]:
        """Takes a name's floors away, and notes that first: the next history is believed anew.

        Raises:
            RegistryError: E_MISSING where there is none, E_ENTRY for a reason that is no line.
        """
        folder = f"{_registry(url)}/{log_segment(name)}"
        keys = [one.key for one in self._store.objects(folder)]
        floors = [Floor(name, *floor) for floor in self._sound(keys)]
        if not keys:
            raise _no_floor(url, name)
        self._note(url, name, floors, reason)
        for key in keys:
            self._store.delete(key)
        return floors

    def forgotten(self, url: str) -> Iterator[Forgotten]:
        """What was forgotten of a registry, oldest first."""
        for one in self._store.objects(f"{FORGOTTEN}/{_registry(url)}"):
            data = self._store.get(one.key, max_bytes=_FORGOTTEN_BYTES)
            try:
                yield Forgotten.model_validate_json(data)
            except ValidationError:
                continue  # not one of ours

    def _note(self, url: str, name: str, floors: list[Floor], reason: str) -> None:
        try:
            made = Forgotten(
                url=url,
                name=name,
                generations=tuple(floor.generation for floor in floors),
                digests=tuple(floor.digest for floor in floors),
                reason=reason,
                forgotten=utc_now(),
            )
        except ValidationError as error:
            raise unfit("reason", error) from None
        when = made.forgotten.replace(":", "")
        key = f"{FORGOTTEN}/{_registry(url)}/{when}-{secrets.token_hex(8)}.json"
        create(self._store, key, canonical_json(made.model_dump(mode="json")).encode())

    def _key(self, url: str, name: str, generation: int) -> str:
        return f"{_registry(url)}/{log_segment(name)}/{generation:012d}.json"

    def _seen(self, url: str, name: str) -> list[tuple[int, str]]:
        found = []
        for one in list(self._store.objects(f"{_registry(url)}/{log_segment(name)}")):
            generation = _generation_of(one.key)
            if generation is None:
                continue
            try:
                found.append((generation, self._digest_at(one.key)))
            except KeyAbsentError:
                continue  # another process raised this floor meanwhile
        return found

    def _sound(self, keys: list[str]) -> Iterator[tuple[int, str]]:
        """Of some keys those that hold a floor: one that is damaged can be forgotten, too."""
        for key in keys:
            generation = _generation_of(key)
            try:
                if generation is not None:
                    yield generation, self._digest_at(key)
            except (RegistryError, KeyAbsentError):
                continue

    def _digest_at(self, key: str) -> str:
        """The digest that a floor holds.

        Raises:
            RegistryError: E_ROLLBACK for anything else: what was seen cannot be told.
        """
        try:
            data = self._store.get(key, max_bytes=_FLOOR_BYTES)
            return parse_digest(data.decode("ascii", "replace"))
        except (ObjectTooLargeError, RegistryError):
            raise RegistryError(
                "E_ROLLBACK",
                f"floor {self._store.url}/{key}",
                expected="the digest of an entry that was seen",
                found="other bytes",
                fix=_HOW_TO_FORGET,
            ) from None


_HOW_TO_FORGET = (
    "if whoever runs the registry says that its history was mended: "
    "specctl registry floors forget NAME --reason TEXT"
)


def _generation_of(key: str) -> int | None:
    """The generation that a floor's key stands for; None for any other key."""
    found = _FLOOR.fullmatch(key)
    return int(found[1]) if found else None


def _registry(url: str) -> str:
    """The segment that stands for a registry."""
    return hex_of(digest_of(url.encode()))


def _no_floor(url: str, name: str) -> RegistryError:
    return RegistryError(
        "E_MISSING",
        f"floors of {url}",
        expected=f"one of {name}",
        found="none",
        fix="`specctl registry floors list` shows what there is; nothing is left to do",
    )


def _rolled_back(
    registry: Registry, name: str, generation: int, expected: str, found: str
) -> RegistryError:
    return RegistryError(
        "E_ROLLBACK",
        f"{registry.url}, {name}, generation {generation}",
        expected=expected,
        found=found,
        fix="the log is older than, or not, what you saw before: ask who runs the registry; "
        + _HOW_TO_FORGET,
    )
