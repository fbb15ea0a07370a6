"""A store in memory, and one that answers as it is told, for tests of what is built on stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.stores import ObjectStore, StoredObject, TransientError, UnknownOutcomeError
from specctl.stores.interface import absent, taken, too_large


def children(found: Iterable[StoredObject], prefix: str) -> list[str]:
    """Names directly below a prefix, of what a listing of it shows."""
    start = len(prefix) + 1 if prefix else 0
    return sorted({one.key[start:].split("/")[0] for one in found})


class MemoryStore:
    """A store that does what an `ObjectStore` promises, and no more."""

    url = "memory"

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put_new(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self.kept:
                raise taken(self.url, key)
            self.kept[key] = data

    def put_file(self, key: str, path: Path) -> None:
        self.put_new(key, path.read_bytes())

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if key not in self.kept:
            raise absent(self.url, key)
        if len(self.kept[key]) > max_bytes:
            raise too_large(self.url, key, max_bytes, len(self.kept[key]))
        return self.kept[key]

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        for key in sorted(self.kept):
            if not prefix or key.startswith(f"{prefix}/"):
                yield StoredObject(key, len(self.kept[key]))

    def children(self, prefix: str) -> list[str]:
        return children(self.objects(prefix), prefix)

    def delete(self, key: str) -> None:
        self.kept.pop(key, None)


@dataclass
class Wrapped:
    """A store whose calls pass through `step` with a word, the key and the call."""

    inner: ObjectStore

    @property
    def url(self) -> str:
        return self.inner.url

    def put_new(self, key: str, data: bytes) -> None:
        self.step("put", key, lambda: self.inner.put_new(key, data))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        found: bytes = self.step("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))
        return found

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        found: list[StoredObject] = self.step("list", prefix, lambda: self.listed(prefix))
        yield from found

    def children(self, prefix: str) -> list[str]:
        return children(self.objects(prefix), prefix)

    def listed(self, prefix: str) -> list[StoredObject]:
        return list(self.inner.objects(prefix))

    def step(self, word: str, key: str, act: Callable[[], Any]) -> Any:
        return act()


@dataclass
class Unsure(Wrapped):
    """Ends puts as they are told: `lost` before, `late` after the bytes were stored; or the store
    `overwrites`. A get may be `unreadable`."""

    outcomes: list[str] = field(default_factory=list)

    def step(self, word: str, key: str, act: Callable[[], Any]) -> Any:
        if word == "get" and self.outcomes[:1] == ["unreadable"]:
            self.outcomes.pop(0)
            raise TransientError(f"{key}: expected an answer, found a timeout", hint="retry")
        outcome = self.outcomes.pop(0) if word == "put" and self.outcomes else "good"
        if outcome == "overwrites":
            self.inner.delete(key)  # type: ignore[attr-defined]
        found = None if outcome == "lost" else act()
        if outcome in ("lost", "late"):
            raise UnknownOutcomeError(f"{key}: expected an answer, found none", hint="retry")
        return found
