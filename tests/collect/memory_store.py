"""Trace sets in memory: in a store as strict as a bucket, and in stores with faults."""

from __future__ import annotations

import random
from collections.abc import Iterator

from specctl.collect.places import Place
from specctl.stores.interface import (
    StoredObject,
    TransientError,
    UnknownOutcomeError,
)
from tests.stores.memory import MemoryStore


class SetStore(MemoryStore):
    """One that holds a trace set."""

    @property
    def place(self) -> Place:
        return Place(self, None, self.url)


class FaultyStore(SetStore):
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


class OverwritingStore(SetStore):
    """A store that ignores `If-None-Match`."""

    def put_new(self, key: str, data: bytes) -> None:
        self.kept[key] = data


class StaleStore(SetStore):
    """Listings that lack the newest objects."""

    num_stale = 1

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        return iter(list(super().objects(prefix))[: -self.num_stale])


def error(kind: type[Exception], key: str) -> Exception:
    return kind(key, expected="e", found="f", fix="x")  # type: ignore[call-arg]
