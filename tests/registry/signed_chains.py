"""A history signed by one key, and junk in it."""

from __future__ import annotations

import pytest

from specctl.artifacts.signing import SigningKey, Trust
from specctl.registry import Author, Package, Writer, promote, push, read_package
from specctl.registry.entries import Note, Publish, write_entry
from specctl.registry.layout import log_key
from tests.registry.pulls import GOLDEN, trusting
from tests.registry.worlds import NAME, HandClock, package, registry_on
from tests.stores.memory import MemoryStore

KEY = SigningKey.generate()
RECORD = trusting(KEY, "publisher", "promoter")


@pytest.fixture(scope="module")
def chain() -> Package:
    return read_package(GOLDEN / "chain")


def signed(store: MemoryStore, clock: HandClock | None = None, key: SigningKey = KEY) -> Writer:
    return Writer(registry_on(store, clock), Author("ann", (key,)), Trust(RECORD))


@pytest.fixture
def store(chain: Package) -> MemoryStore:
    store = MemoryStore()
    push(signed(store), chain, NAME)
    promote(signed(store), NAME, "prod", chain.digest)
    return store


def add_junk(store: MemoryStore, clock: HandClock | None = None) -> str:
    """What anybody can do who may create objects; returns its key."""
    registry = registry_on(store, clock)
    log = registry.log(NAME)
    action = Publish(digest=package("evil").digest)
    made = write_entry(
        log._place(), action, Author("eve"), created=registry.clock.utc(), note=Note()
    )
    key = log_key(NAME, len(log.entries))
    store.put_new(key, made.envelope)
    return key
