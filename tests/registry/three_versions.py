"""A name with three versions, one of them in production."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specctl.registry import promote, push
from specctl.registry.state import Pointer
from specctl.stores import ObjectStore
from tests.registry.worlds import NAME, Wrapped, package, registry_on, writer_on
from tests.stores.memory import MemoryStore

ONE, TWO, THREE = (package(word).digest for word in ("one", "two", "three"))


@pytest.fixture
def store() -> MemoryStore:
    """Three versions; `prod` is the first."""
    store = MemoryStore()
    writer = writer_on(store)
    for word in ("one", "two", "three"):
        push(writer, package(word), NAME)
    promote(writer, NAME, "prod", ONE)
    return store


def prod(store: ObjectStore) -> Pointer:
    return registry_on(store).log(NAME).state.aliases["prod"]


class Overtaken(Wrapped):
    """Right before the first put of a log entry, another writer does something."""

    meanwhile: Callable[[], object] | None = None

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        if word == "put" and key.startswith("log/") and self.meanwhile:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return act()
