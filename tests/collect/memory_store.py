"""A store in memory, as strict as a bucket, with faults and with turns that a test hands out."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

from specctl.collect.places import Place
from specctl.stores.interface import (
    KeyAbsentError,
    KeyTakenError,
    StoredObject,
    TransientError,
    UnknownOutcomeError,
)


class MemoryStore:
    """See `ObjectStore`."""

    url = "memory://set"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put_new(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self.held:
                raise error(KeyTakenError, key)
            self.held[key] = data

    def put_file(self, key: str, path: Path) -> None:
        self.put_new(key, path.read_bytes())

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if key not in self.held:
            raise error(KeyAbsentError, key)
        return self.held[key]

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        keys = sorted(key for key in self.held if key == prefix or key.startswith(f"{prefix}/"))
        return iter([StoredObject(key, len(self.held[key]), 0.0) for key in keys])

    def delete(self, key: str) -> None:
        self.held.pop(key, None)

    @property
    def place(self) -> Place:
        return Place(self, None, self.url)


class FaultyStore(MemoryStore):
    """Answers as stores do on a bad day: conflicts, errors before and *after* it stored.

    Args:
        rate: share of calls that fail, in [0, 1).
    """

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__()
        self.rate, self._draw = rate, random.Random(seed)
        self.num_late = 0

    def put_new(self, key: str, data: bytes) -> None:
        fault = self._fault()
        if fault == "conflict":  # 409, or a 500 before anything was stored
            raise error(UnknownOutcomeError, key)
        super().put_new(key, data)
        if fault == "late":  # a 500, or a timeout, after it was stored
            self.num_late += 1
            raise error(UnknownOutcomeError, key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if self._fault():
            raise error(TransientError, key)
        return super().get(key, max_bytes=max_bytes)

    def _fault(self) -> str | None:
        with self._lock:
            if self._draw.random() >= self.rate:
                return None
            return self._draw.choice(("conflict", "late"))


class OverwritingStore(MemoryStore):
    """A store that ignores `If-None-Match`."""

    def put_new(self, key: str, data: bytes) -> None:
        self.held[key] = data


class StaleStore(MemoryStore):
    """Listings that lack the newest objects."""

    num_stale = 1

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        return iter(list(super().objects(prefix))[: -self.num_stale])


def error(kind: type[Exception], key: str) -> Exception:
    return kind(key, expected="e", found="f", fix="x")  # type: ignore[call-arg]
