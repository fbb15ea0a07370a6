"""Registries in memory, stores that die or lie, artifacts of a word."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.manifest import CARD, MANIFEST, TENSORS, digest_of, utc_now
from specctl.artifacts.signing import SigningKey
from specctl.errors import RegistryError, SpecctlError, StoreError
from specctl.records import canonical_json
from specctl.registry import Cache, Package, Reader, Registry, Writer, parse_reference
from specctl.registry.opening import Marker, make_registry, read_marker
from specctl.registry.trust import Trust, TrustedKey
from specctl.stores import ObjectStore, StoredObject, TransientError, UnknownOutcomeError
from tests.stores.memory import Wrapped

NAME = "qwen3-8b+eagle3@h200:chat"
PROD, NEXT = (parse_reference(f"{NAME}@{alias}") for alias in ("prod", "next"))


def package(word: str, *, shared: str = "card") -> Package:
    """Files with digests, as a registry sees them; nothing that a loader would accept."""
    files = {TENSORS: word.encode(), CARD: shared.encode()}
    listed = {
        name: {"digest": digest_of(data), "size_bytes": len(data)} for name, data in files.items()
    }
    manifest = canonical_json({"artifact_version": 1, "files": listed, "word": word}).encode()
    return Package(digest_of(manifest), {MANIFEST: manifest, **files})


def code_of(attempt: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(SpecctlError) as refused:
        attempt(*arguments, **options)
    return str(refused.value.code)  # type: ignore[attr-defined]


# ------------------------------------------------------------------ stores


class Killed(BaseException):
    """The process died; nothing in it can catch that."""


@dataclass
class Dying(Wrapped):
    """Dies before or after its n-th call (from 0)."""

    dies_at: int = -1
    is_after: bool = False
    num_calls: int = 0

    def step(self, word: str, key: str, act: Callable[[], Any]) -> Any:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number == self.dies_at:
            if self.is_after:
                with suppress(StoreError):
                    act()
            raise Killed
        return act()


@dataclass
class Stale(Wrapped):
    """Lists the objects that were there when it was made."""

    seen: list[StoredObject] = field(default_factory=list)

    def listed(self, prefix: str) -> list[StoredObject]:
        return [one for one in self.seen if one.key.startswith(f"{prefix}/")]


@dataclass
class Ignoring(Wrapped):
    """A folder that ignores the condition of a put."""

    def step(self, word: str, key: str, act: Callable[[], Any]) -> Any:
        if word == "put":
            Path(self.url, key).unlink(missing_ok=True)
        return act()


@dataclass
class Dark(Wrapped):
    """Stores the first log entry; then the network is gone."""

    is_dark: bool = False

    def step(self, word: str, key: str, act: Callable[[], Any]) -> Any:
        if not self.is_dark:
            found = act()
            self.is_dark = word == "put" and key.startswith("log/")
            if not self.is_dark:
                return found
        error = UnknownOutcomeError if word == "put" else TransientError
        raise error(f"{key}: no answer", hint="try again")


@dataclass
class Overtaken(Wrapped):
    """Right before the first put of a log entry, another writer does something."""

    meanwhile: Callable[[Writer], Any] | None = None

    def step(self, word: str, key: str, act: Callable[[], Any]) -> Any:
        if word == "put" and key.startswith("log/") and self.meanwhile:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile(writer_on(self.inner, actor="bob"))
        return act()


# ------------------------------------------------------------------ registries and users


def registry_on(store: ObjectStore) -> Registry:
    """An open registry on a store, which is made one if it is none."""
    try:
        marker = read_marker(store)
    except RegistryError:
        registry_id = f"{id(store):032x}"[-32:]
        marker = Marker(registry_version=1, registry_id=registry_id, created=utc_now())
        make_registry(store, marker)
    return Registry(store, marker)


def writer_on(
    store: ObjectStore,
    key: SigningKey | None = None,
    *,
    actor: str = "ann",
    trust: Trust | None = None,
) -> Writer:
    """By default a writer who signs nothing and trusts nobody."""
    return Writer(registry_on(store), trust or Trust(), actor, key)


def reader_in(folder: Path, trust: Trust | None = None) -> Reader:
    """A user with a home of their own."""
    return Reader(trust or Trust(), Cache(folder / "cache"))


def trusting(*keys: SigningKey, name: str = "qwen3*") -> Trust:
    """A trust file that believes some keys, which must sign for names of qwen3."""
    return Trust(keys=tuple(TrustedKey.of(key.public_key, names=(name,)) for key in keys))
