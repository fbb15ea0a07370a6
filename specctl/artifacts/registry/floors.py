"""How far a user has seen each log: nothing older is believed again.

A floor is the generation of a log and the digest of the entry there. It is raised only after all
checks of a pull have passed: a floor written before them could lock a user onto a bad log
(tough, CVE-2025-2888). Floors are kept by exclusive creation too, one file a generation, so that
two processes of a user never lower one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.artifacts.manifest import digest_of
from specctl.artifacts.registry.entries import Logged
from specctl.artifacts.registry.layout import generation_of, hex_of
from specctl.artifacts.registry.log import Log
from specctl.artifacts.registry.names import log_segment
from specctl.artifacts.registry.room import Registry
from specctl.artifacts.userdirs import state_home
from specctl.errors import RegistryError
from specctl.stores import KeyAbsentError, KeyTakenError, create
from specctl.stores.local import LocalStore


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
        for generation, digest in self._seen(registry, log.name):
            found = log.entries[generation].digest if generation < len(log.entries) else "none"
            if found != digest:
                raise _rolled_back(registry, log.name, generation, digest, found)

    def raise_to(self, registry: Registry, newest: Logged) -> None:
        """Remembers the newest entry of a log, once everything passed every check.

        Raises:
            RegistryError: E_ROLLBACK where another process saw another entry there.
        """
        name, newest_generation = newest.entry.name, newest.entry.generation
        key = self._key(registry, name, newest_generation)
        try:
            create(self._store, key, newest.digest.encode())
        except KeyTakenError:
            seen = self._store.get(key, max_bytes=80).decode()
            raise _rolled_back(registry, name, newest_generation, seen, newest.digest) from None
        for generation, _ in self._seen(registry, name):
            if generation < newest_generation:
                self._store.delete(self._key(registry, name, generation))

    def _key(self, registry: Registry, name: str, generation: int) -> str:
        return f"{self._folder(registry, name)}/{generation:012d}.json"

    def _folder(self, registry: Registry, name: str) -> str:
        return f"{hex_of(digest_of(registry.url.encode()))}/{log_segment(name)}"

    def _seen(self, registry: Registry, name: str) -> list[tuple[int, str]]:
        found = []
        for one in list(self._store.objects(self._folder(registry, name))):
            generation = generation_of(one.key)
            if generation is None:
                continue
            try:
                found.append((generation, self._store.get(one.key, max_bytes=80).decode()))
            except KeyAbsentError:
                continue  # another process raised this floor meanwhile
        return found


def _rolled_back(
    registry: Registry, name: str, generation: int, expected: str, found: str
) -> RegistryError:
    return RegistryError(
        "E_ROLLBACK",
        f"{registry.url}, {name}, generation {generation}",
        expected=expected,
        found=found,
        fix="the log is older than, or not, what you saw before: ask who runs the registry",
    )
