"""A store in memory, for tests of what is built on stores."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from specctl.stores import StoredObject
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
