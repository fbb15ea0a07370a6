"""Registries in memory, stores that die or lie, clocks set by hand, artifacts of a word."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from specctl.artifacts.facts import utc_now
from specctl.artifacts.manifest import CARD, MANIFEST, TENSORS, digest_of
from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError, StoreError
from specctl.policy.parse import canonical_json
from specctl.registry import (
    Author,
    Cache,
    Floors,
    Package,
    Reader,
    Registry,
    StoreContent,
    Writer,
)
from specctl.registry.room import Clock, Marker, read_marker, write_marker
from specctl.stores import ObjectStore, StoredObject, probe
from specctl.stores.interface import UnknownOutcomeError
from tests.stores.memory import children

NAME = "qwen3-8b+eagle3@h200:chat"
LIMIT_S = 60
GRACE_S = 2.0 * LIMIT_S


def package(word: str, *, shared: str = "card") -> Package:
    """Files with digests, as a registry sees them; nothing that a loader would take."""
    files = {TENSORS: word.encode(), CARD: shared.encode()}
    listed = {
        name: {"digest": digest_of(data), "size_bytes": len(data)} for name, data in files.items()
    }
    manifest = canonical_json({"artifact_version": 1, "files": listed, "word": word}).encode()
    return Package(digest_of(manifest), {MANIFEST: manifest, **files})


class Killed(BaseException):
    """The process died; nothing in it can catch that."""


@dataclass
class Wrapped:
    """A store whose calls pass through `step`, told what is about to happen and how to do it."""

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

    def delete(self, key: str) -> None:
        self.step("delete", key, lambda: self.inner.delete(key))

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        return act()


@dataclass
class Dying(Wrapped):
    """Dies before or after its n-th call (from 0)."""

    dies_at: int = -1
    is_after: bool = False
    num_calls: int = 0

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number == self.dies_at:
            if self.is_after:
                with suppress(StoreError):
                    act()
            raise Killed
        return act()


@dataclass
class Unsure(Wrapped):
    """Ends puts without an answer: `lost` before, `late` after the bytes were stored."""

    outcomes: list[str] = field(default_factory=list)

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        outcome = self.outcomes.pop(0) if word == "put" and self.outcomes else "good"
        if outcome != "lost":
            found = act()
        if outcome in ("lost", "late"):
            raise UnknownOutcomeError(key, expected="an answer", found="none", fix="retry")
        return found


@dataclass
class Stale(Wrapped):
    """Lists what was there when it was made."""

    seen: list[StoredObject] = field(default_factory=list)

    def listed(self, prefix: str) -> list[StoredObject]:
        return [one for one in self.seen if one.key.startswith(f"{prefix}/")]


@dataclass
class HandClock(Clock):
    """Time that passes when the test says so."""

    now_s: float = 4_000_000_000.0  # 2096: behind what any real store says

    def utc(self) -> str:
        return datetime.fromtimestamp(self.now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def elapsed_s(self) -> float:
        return self.now_s


def _marker() -> Marker:
    """One with a limit that no user may choose: `HandClock` decides how long a request takes."""
    return Marker(
        registry_version=1,
        registry_id=secrets.token_hex(16),
        created=utc_now(),
        publish_limit_s=LIMIT_S,
    )


def registry_on(store: ObjectStore, clock: Clock | None = None, *, url: str = "memory") -> Registry:
    """An open registry on a store, which is made one if it is none."""
    try:
        marker = read_marker(store)
    except RegistryError:
        probe(store)
        marker = write_marker(store, _marker())
    return Registry(url, store, StoreContent(store), marker, clock or HandClock())


def writer_on(store: ObjectStore, clock: Clock | None = None, actor: str = "ann") -> Writer:
    """A writer who trusts nobody and signs nothing."""
    return Writer(registry_on(store, clock), Author(actor), Trust())


def reader_in(folder: Path, trust: Trust | None = None) -> Reader:
    """A user with a home of their own."""
    return Reader(trust or Trust(), Floors(folder / "floors"), Cache(folder / "cache"))
