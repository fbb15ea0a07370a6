"""Aliases: one winner a move, nobody else's move is undone, an older version only by a new move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specctl.artifacts.signing import SigningKey, Trust, TrustedKey, TrustRecord
from specctl.artifacts.signing.options import EVER
from specctl.errors import ArtifactError, RegistryError
from specctl.registry import Author, Note, Writer, promote, push, rollback
from specctl.registry.state import Pointer
from specctl.registry.trusting import check_unexpired
from tests.registry.three_versions import ONE, THREE, TWO, Overtaken, prod, store
from tests.registry.worlds import NAME, package, registry_on, writer_on
from tests.stores.memory import MemoryStore

__all__ = ["store"]  # a fixture


def overtaken(store: MemoryStore, meanwhile: Callable[[Writer], object]) -> Writer:
    slow = Overtaken(store)
    slow.meanwhile = lambda: meanwhile(writer_on(store, actor="bob"))
    return writer_on(slow)


def test_a_move_names_what_it_replaces(store: MemoryStore) -> None:
    action = promote(writer_on(store), NAME, "prod", TWO).entry.action
    assert (action.expected_digest, action.expected_generation) == (ONE, 3)  # type: ignore[union-attr]
    assert prod(store) == Pointer(TWO, 4)


def test_a_race_lost_to_another_alias_or_version_is_run_again(store: MemoryStore) -> None:
    promote(overtaken(store, lambda bob: push(bob, package("four"), NAME)), NAME, "prod", TWO)
    assert prod(store) == Pointer(TWO, 5)
    promote(overtaken(store, lambda bob: promote(bob, NAME, "next", TWO)), NAME, "prod", THREE)
    assert prod(store) == Pointer(THREE, 7)


def test_a_race_lost_to_the_same_alias_is_a_conflict(store: MemoryStore) -> None:
    slow = overtaken(store, lambda bob: promote(bob, NAME, "prod", TWO))
    with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT") as refused:
        promote(slow, NAME, "prod", THREE)
    assert refused.value.found == TWO
    assert prod(store) == Pointer(TWO, 4)


def test_there_and_back_is_a_conflict_too(store: MemoryStore) -> None:
    """ABA: the digest is what it was, but somebody decided twice meanwhile."""

    def there_and_back(bob: Writer) -> None:
        promote(bob, NAME, "prod", TWO)
        promote(bob, NAME, "prod", ONE)

    with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT"):
        promote(overtaken(store, there_and_back), NAME, "prod", THREE)
    assert prod(store) == Pointer(ONE, 5)


def test_two_who_make_an_alias_do_not_both_win(store: MemoryStore) -> None:
    slow = overtaken(store, lambda bob: promote(bob, NAME, "next", TWO))
    with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT"):
        promote(slow, NAME, "next", THREE)


def test_what_the_caller_expects_is_asked_for(store: MemoryStore) -> None:
    with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT"):
        promote(writer_on(store), NAME, "prod", TWO, expect=THREE)
    promote(writer_on(store), NAME, "prod", TWO, expect=ONE)


def test_only_published_whole_versions_are_pointed_to(store: MemoryStore) -> None:
    """Family 37: an alias to a missing digest."""
    writer = writer_on(store)
    with pytest.raises(RegistryError, match="E_MISSING"):
        promote(writer, NAME, "prod", package("never").digest)
    push(writer, package("else"), "other")
    with pytest.raises(RegistryError, match="E_MISSING"):
        promote(writer, NAME, "prod", package("else").digest)
    for key in [key for key in store.kept if key.startswith("blobs/")]:
        store.delete(key)
    with pytest.raises(ArtifactError, match="E_MISSING"):
        promote(writer, NAME, "prod", TWO)
    assert prod(store) == Pointer(ONE, 3)


def test_a_move_to_where_it_is_writes_nothing(store: MemoryStore) -> None:
    before = dict(store.kept)
    there = promote(writer_on(store), NAME, "prod", ONE)
    back = rollback(writer_on(store), NAME, "prod", note=Note("why"), to=ONE)
    assert (there.changed, back.changed, store.kept) == (False, False, before)
    assert there.entry.generation == prod(store).generation == 3
    with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT"):
        promote(writer_on(store), NAME, "prod", ONE, expect=TWO)
    assert promote(writer_on(store), NAME, "prod", TWO).changed


def test_a_renewal_of_expiry_or_signature_is_a_move(store: MemoryStore) -> None:
    key = SigningKey.generate()
    until = Note(expires="2099-01-01T00:00:00Z")
    signer = Writer(registry_on(store), Author("ann", (key,)), Trust())
    assert promote(writer_on(store), NAME, "prod", ONE, note=until).changed
    assert promote(writer_on(store), NAME, "prod", ONE).changed, "now it never expires"
    assert not promote(writer_on(store), NAME, "prod", ONE).changed
    assert promote(signer, NAME, "prod", ONE).changed
    assert not promote(signer, NAME, "prod", ONE).changed
    assert not promote(writer_on(store), NAME, "prod", ONE).changed
    line = TrustedKey.of(key.public_key, names=("*",), roles=("publisher",), not_before=EVER)
    record = TrustRecord(trust_version=1, keys=(line,), require=("*",), threshold=1)
    push(Writer(registry_on(store), Author("ann", (key,)), Trust(record)), package("one"), NAME)
    with pytest.raises(ArtifactError, match="promoter"):  # readers refuse what is there
        promote(Writer(registry_on(store), Author("bob"), Trust(record)), NAME, "prod", ONE)


def test_what_expired_says_what_renews_it(store: MemoryStore) -> None:
    until = Note(expires="2098-01-01T00:00:00Z")
    entries = {
        "registry push FOLDER": push(writer_on(store), package("one"), NAME, note=until),
        "registry promote NAME": promote(writer_on(store), NAME, "prod", ONE, note=until),
    }
    for fix, logged in entries.items():
        with pytest.raises(ArtifactError, match="E_STALE") as refused:
            check_unexpired(logged, NAME, "2098-01-01T00:00:00Z")
        assert fix in refused.value.fix


@pytest.mark.parametrize("alias", ["Prod", "a/b", "", "a:b", "sha256:x"])
def test_an_alias_is_a_word(store: MemoryStore, alias: str) -> None:
    with pytest.raises(RegistryError, match="E_NAME"):
        promote(writer_on(store), NAME, alias, ONE)


def test_text_for_people_is_plain(store: MemoryStore) -> None:
    for note in (Note("a\x1b[2J"), Note("x" * 300), Note(expires="tomorrow")):
        with pytest.raises(RegistryError, match="E_ENTRY") as refused:
            push(writer_on(store), package("four"), NAME, note=note)
        assert str(refused.value).isprintable()
