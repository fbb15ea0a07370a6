"""Aliases: one winner a move, nobody else's move is undone, back in the alias's own history."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.artifacts.signing import SigningKey
from specctl.errors import ArtifactError, RegistryError, UsageError
from specctl.registry import Writer, promote, push, rollback
from specctl.registry.log import Pointer
from specctl.stores import ObjectStore, UnknownOutcomeError
from tests.registry.worlds import (
    NAME,
    Dark,
    Overtaken,
    code_of,
    package,
    registry_on,
    trusting,
    writer_on,
)
from tests.stores.memory import MemoryStore

ONE, TWO, THREE = (package(word).digest for word in ("one", "two", "three"))
WHY = "τ fell on chat"


def begun() -> MemoryStore:
    """Three versions; `prod` is the first."""
    store = MemoryStore()
    writer = writer_on(store)
    for word in ("one", "two", "three"):
        push(writer, package(word), NAME)
    promote(writer, NAME, "prod", ONE)
    return store


@pytest.fixture
def store() -> MemoryStore:
    return begun()


def prod(store: ObjectStore) -> Pointer:
    return registry_on(store).log(NAME).state.aliases["prod"]


def moved_through(store: MemoryStore, *digests: str) -> Writer:
    writer = writer_on(store)
    for digest in digests:
        promote(writer, NAME, "prod", digest)
    return writer


def test_a_race_lost_to_another_alias_or_version_is_run_again(store: MemoryStore) -> None:
    slow = Overtaken(store, lambda bob: push(bob, package("four"), NAME))
    promote(writer_on(slow), NAME, "prod", TWO)
    assert prod(store) == Pointer(TWO, 5)
    slow = Overtaken(store, lambda bob: promote(bob, NAME, "next", TWO))
    promote(writer_on(slow), NAME, "prod", THREE)
    assert prod(store) == Pointer(THREE, 7)


def there_and_back(bob: Writer) -> None:
    """The digest is the same again, but somebody decided twice meanwhile (ABA)."""
    promote(bob, NAME, "prod", TWO)
    promote(bob, NAME, "prod", ONE)


@pytest.mark.parametrize(
    ("alias", "meanwhile", "found"),
    [
        ("prod", lambda bob: promote(bob, NAME, "prod", TWO), TWO),
        ("prod", there_and_back, ONE),
        ("next", lambda bob: promote(bob, NAME, "next", TWO), TWO),
    ],
)
def test_a_race_lost_to_the_same_alias_is_a_conflict(
    store: MemoryStore, alias: str, meanwhile: object, found: str
) -> None:
    slow = writer_on(Overtaken(store, meanwhile))  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT") as refused:
        promote(slow, NAME, alias, THREE)
    assert f"points to {found}" in str(refused.value)
    assert registry_on(store).log(NAME).state.aliases[alias].digest == found


def test_only_published_whole_versions_are_pointed_to(store: MemoryStore) -> None:
    """Family 37: an alias to a missing digest."""
    writer = writer_on(store)
    push(writer, package("else"), "other")
    for absent in ("never", "else"):
        assert code_of(promote, writer, NAME, "prod", package(absent).digest) == "E_MISSING"
    for key in [key for key in store.kept if key.startswith("blobs/")]:
        store.delete(key)
    with pytest.raises(ArtifactError, match="E_MISSING"):
        promote(writer, NAME, "prod", TWO)
    assert prod(store) == Pointer(ONE, 3)


def test_a_move_to_the_present_version_writes_nothing(store: MemoryStore) -> None:
    before = dict(store.kept)
    there = promote(writer_on(store), NAME, "prod", ONE)
    back = rollback(writer_on(store), NAME, "prod", reason=WHY, to=ONE)
    assert (there.changed, back.changed, store.kept) == (False, False, before)
    assert there.entry.generation == prod(store).generation == 3
    assert code_of(promote, writer_on(store), NAME, "prod", ONE, expect=TWO) == "E_ALIAS_CONFLICT"
    assert promote(writer_on(store), NAME, "prod", TWO).changed


def test_a_signature_on_a_move_that_is_there_is_a_move(store: MemoryStore) -> None:
    key = SigningKey.generate()
    assert promote(writer_on(store, key), NAME, "prod", ONE).changed
    assert not promote(writer_on(store, key), NAME, "prod", ONE).changed
    assert not promote(writer_on(store), NAME, "prod", ONE).changed
    other = SigningKey.generate()
    trust = trusting(key, other)
    push(writer_on(store, key, trust=trust), package("one"), NAME)
    assert promote(writer_on(store, other, trust=trust), NAME, "prod", ONE).changed
    unsigned = writer_on(store, actor="bob", trust=trusting(SigningKey.generate()))
    with pytest.raises(ArtifactError, match="E_SIG"):
        promote(unsigned, NAME, "prod", ONE)


STEPS = st.tuples(st.sampled_from(["promote", "sign", "back", "back to"]), st.integers(0, 2))


@settings(max_examples=30)
@given(st.lists(STEPS, max_size=10))
def test_an_alias_is_a_stack_that_rollbacks_cut(steps: list[tuple[str, int]]) -> None:
    """A rollback never goes forward, and passes over moves that only added a signature."""
    writer, held = writer_on(begun()), [ONE]
    for verb, number in steps:
        digest = (ONE, TWO, THREE)[number]
        to = digest if verb == "back to" else None
        if verb in ("promote", "sign"):
            key = SigningKey.generate() if verb == "sign" else None
            promote(replace(writer, key=key), NAME, "prod", digest)
            held += [digest] if digest != held[-1] else []
        elif to in held:
            rollback(writer, NAME, "prod", reason=WHY, to=to)
            held = held[: len(held) - held[::-1].index(digest)]
        elif to is None and len(held) > 1:
            rollback(writer, NAME, "prod", reason=WHY)
            held.pop()
        else:
            assert code_of(rollback, writer, NAME, "prod", reason=WHY, to=to) == "E_NO_PREVIOUS"
        assert prod(writer.registry.store).digest == held[-1]


def test_a_rollback_with_expect_is_done_once(store: MemoryStore) -> None:
    """Repeated after a lost answer, or by two people: the second is refused."""
    moved_through(store, TWO, THREE)
    with pytest.raises(UnknownOutcomeError) as lost:
        rollback(writer_on(Dark(store)), NAME, "prod", reason=WHY)
    assert f"--expect {THREE}" in lost.value.hint
    assert prod(store).digest == TWO, "it was done"
    for alias in ("prod", "unknown"):
        with pytest.raises(RegistryError, match=f"E_ALIAS_CONFLICT.*not to {THREE}"):
            rollback(writer_on(store), NAME, alias, reason=WHY, expect=THREE)
    assert rollback(writer_on(store), NAME, "prod", reason=WHY, expect=TWO).changed
    assert prod(store).digest == ONE


def test_a_rollback_needs_a_reason_and_an_older_version(store: MemoryStore) -> None:
    writer = writer_on(store)
    with pytest.raises(UsageError, match="reason is empty"):
        rollback(writer, NAME, "prod", reason=" ")
    for alias in ("prod", "unknown"):
        assert code_of(rollback, writer, NAME, alias, reason=WHY) == "E_NO_PREVIOUS"
    assert code_of(rollback, writer, "unknown", "prod", reason=WHY) == "E_UNKNOWN_NAME"
