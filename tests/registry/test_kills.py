"""A process killed before and after every call of the store: a reader sees all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from specctl.artifacts.signing import SigningKey
from specctl.errors import ArtifactError, RegistryError
from specctl.registry import Writer, promote, push, rollback
from specctl.registry.log import Publish
from specctl.registry.trust import Trust
from specctl.registry.verifying import verify
from tests.registry.worlds import NAME, Dying, Killed, package, registry_on, writer_on
from tests.stores.memory import MemoryStore

ONE, TWO, KEY = package("one"), package("two"), SigningKey.generate()
Verb = Callable[[Writer], object]


def begun() -> MemoryStore:
    """Two versions, `prod` at the second; a second name."""
    store = MemoryStore()
    writer = writer_on(store, KEY)
    for one in (ONE, TWO):
        push(writer, one, NAME)
        promote(writer, NAME, "prod", one.digest)
    push(writer, package("other"), "other")
    return store


def push_third(writer: Writer) -> None:
    push(writer, package("three"), NAME)


def promote_first(writer: Writer) -> None:
    promote(writer, NAME, "prod", ONE.digest)


def roll_back(writer: Writer) -> None:
    rollback(writer, NAME, "prod", reason="why", expect=TWO.digest)


def push_hastily(writer: Writer) -> None:
    """A mutant: the log entry first, the artifact afterwards."""
    three, log = package("three"), writer.registry.log(NAME)
    log.append(log.draft(Publish(digest=three.digest), writer.actor, writer.key))
    writer.registry.content.publish(three.digest, three.files)


def check_readers(store: MemoryStore) -> None:
    """Every version and every alias that a fresh reader sees is whole."""
    registry = registry_on(store)
    log = registry.log(NAME)
    for digest in log.state.versions:
        registry.content.fetch(digest)
    assert log.state.aliases["prod"].digest in (ONE.digest, TWO.digest)
    assert verify(registry, Trust()).findings == []


def num_calls(verb: Verb) -> int:
    store = Dying(begun())
    verb(writer_on(store, KEY))
    return store.num_calls


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", [push_third, promote_first, roll_back])
def test_a_kill_at_any_call_leaves_all_or_nothing(verb: Verb, *, is_after: bool) -> None:
    total = num_calls(verb)
    assert total >= 8, "no calls to be killed at would show nothing"
    for dies_at in range(total):
        store = begun()
        with pytest.raises(Killed):
            verb(writer_on(Dying(store, dies_at, is_after), KEY))
        check_readers(store)
        with suppress(RegistryError):  # a rollback that was done is refused
            verb(writer_on(store, KEY))
        check_readers(store)


def test_the_wrong_order_would_be_seen() -> None:
    num_torn = 0
    for dies_at in range(num_calls(push_hastily)):
        store = begun()
        with pytest.raises(Killed):
            push_hastily(writer_on(Dying(store, dies_at)))
        try:
            check_readers(store)
        except ArtifactError:
            num_torn += 1
    assert num_torn >= len(package("three").files)
