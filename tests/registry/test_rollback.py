"""Rollbacks: back in the alias's own history, never forward, and done once however often said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from specctl.errors import RegistryError, UsageError
from specctl.registry import Author, Note, Writer, promote, rollback
from specctl.registry.entries import Move
from specctl.registry.state import Pointer
from specctl.stores.interface import TransientError, UnknownOutcomeError
from tests.registry.three_versions import ONE, THREE, TWO, prod, store
from tests.registry.worlds import NAME, Wrapped, registry_on, writer_on
from tests.stores.memory import MemoryStore

__all__ = ["store"]  # a fixture


@dataclass
class Dark(Wrapped):
    """The first log entry is stored; then the network is gone."""

    is_dark: bool = False

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        if not self.is_dark:
            found = act()
            self.is_dark = word == "put" and key.startswith("log/")
            if not self.is_dark:
                return found
        error = UnknownOutcomeError if word == "put" else TransientError
        raise error(key, expected="an answer", found="none", fix="try again")


def test_a_rollback_is_a_new_generation_with_a_reason(store: MemoryStore) -> None:
    writer, why = writer_on(store), Note("τ fell on chat")
    promote(writer, NAME, "prod", TWO)
    moved = rollback(writer, NAME, "prod", note=why)
    assert (moved.entry.action.kind, moved.entry.reason) == ("rollback", why.reason)
    assert prod(store) == Pointer(ONE, 5)
    assert len(registry_on(store).log(NAME).entries) == 6


def moved_through(store: MemoryStore, *digests: str) -> Writer:
    writer = writer_on(store)
    for digest in digests:
        promote(writer, NAME, "prod", digest)
    return writer


def test_a_rollback_never_goes_forward_to_what_was_rolled_back_from(store: MemoryStore) -> None:
    writer, why = moved_through(store, TWO, THREE), Note("why")
    for older in (TWO, ONE):
        rollback(writer, NAME, "prod", note=why)
        assert prod(store).digest == older
    for to in (None, TWO, THREE):
        with pytest.raises(RegistryError, match="E_NO_PREVIOUS"):
            rollback(writer, NAME, "prod", note=why, to=to)
    promote(writer, NAME, "prod", THREE)
    rollback(writer, NAME, "prod", note=why)
    assert prod(store).digest == ONE


def test_a_rollback_past_several_takes_them_all_away(store: MemoryStore) -> None:
    writer, why = moved_through(store, TWO, THREE), Note("why")
    rollback(writer, NAME, "prod", note=why, to=ONE)
    assert prod(store).digest == ONE
    with pytest.raises(RegistryError, match="E_NO_PREVIOUS"):
        rollback(writer, NAME, "prod", note=why)


def test_a_rollback_goes_to_what_the_alias_had_alone(store: MemoryStore) -> None:
    """Not to what another alias had, nor to what nobody ever pointed to, however old that is."""
    writer = moved_through(store, THREE)
    promote(writer, NAME, "canary", TWO)
    with pytest.raises(RegistryError, match=f"E_NO_PREVIOUS.*had before: {ONE}, found") as refused:
        rollback(writer, NAME, "prod", note=Note("why"), to=TWO)
    assert "registry promote" in refused.value.fix
    assert prod(store).digest == THREE


def test_a_promotion_back_is_a_move_like_any_other(store: MemoryStore) -> None:
    """It has the version of before, and what it replaced is right behind it."""
    writer, why = moved_through(store, TWO, ONE), Note("why")
    for older in (TWO, ONE):
        rollback(writer, NAME, "prod", note=why)
        assert prod(store).digest == older
    with pytest.raises(RegistryError, match="E_NO_PREVIOUS"):
        rollback(writer, NAME, "prod", note=why)


def test_histories_of_older_versions_that_rolled_forward_are_read(store: MemoryStore) -> None:
    """They wrote rollbacks to any version: such a one is read as a move."""
    writer = moved_through(store, TWO)
    rollback(writer, NAME, "prod", note=Note("why"))
    log = registry_on(store).log(NAME)
    expected_digest, expected_generation = log.state.expected("prod")
    forward = Move(
        kind="rollback",
        alias="prod",
        digest=THREE,
        expected_digest=expected_digest,
        expected_generation=expected_generation,
    )
    log.append(forward, Author("old"), created="2026-01-01T00:00:00Z", note=Note("again"))
    assert prod(store).digest == THREE
    rollback(writer_on(store), NAME, "prod", note=Note("why"))
    assert prod(store).digest == ONE


def test_a_rollback_from_what_is_expected_is_done_once(store: MemoryStore) -> None:
    """Said again after a lost answer, or by two people: the second finds it done."""
    writer, why = moved_through(store, TWO, THREE), Note("why")
    with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT") as refused:
        rollback(writer, NAME, "prod", note=why, expect=TWO)
    assert refused.value.found == THREE
    first = rollback(writer, NAME, "prod", note=why, expect=THREE)
    before = dict(store.kept)
    for to in (None, TWO):
        again = rollback(writer_on(store), NAME, "prod", note=why, expect=THREE, to=to)
        assert (again.changed, again.digest) == (False, first.digest)
    for to, alias in ((ONE, "prod"), (None, "unknown")):
        with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT"):
            rollback(writer, NAME, alias, note=why, expect=THREE, to=to)
    assert store.kept == before
    promote(writer, NAME, "prod", ONE)
    with pytest.raises(RegistryError, match="E_ALIAS_CONFLICT"):
        rollback(writer, NAME, "prod", note=why, expect=TWO)


def test_a_lost_answer_says_how_a_rollback_is_said_again(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.stores.creating.FIRST_WAIT_S", 0.0)
    moved_through(store, TWO, THREE)
    with pytest.raises(UnknownOutcomeError, match=f"--expect {THREE}"):
        rollback(writer_on(Dark(store)), NAME, "prod", note=Note("why"))
    assert prod(store).digest == TWO, "it was done"
    again = rollback(writer_on(store), NAME, "prod", note=Note("why"), expect=THREE)
    assert (again.changed, prod(store).digest) == (False, TWO)


def test_a_rollback_passes_over_renewals(store: MemoryStore) -> None:
    promote(writer_on(store), NAME, "prod", TWO)
    promote(writer_on(store), NAME, "prod", TWO, note=Note(expires="2099-01-01T00:00:00Z"))
    assert rollback(writer_on(store), NAME, "prod", note=Note("why")).changed
    assert prod(store).digest == ONE


def test_a_rollback_needs_a_reason_and_somewhere_to_go(store: MemoryStore) -> None:
    writer = writer_on(store)
    with pytest.raises(UsageError, match="--reason"):
        rollback(writer, NAME, "prod", note=Note())
    for alias in ("prod", "unknown"):
        with pytest.raises(RegistryError, match="E_NO_PREVIOUS"):
            rollback(writer, NAME, alias, note=Note("why"))
    with pytest.raises(RegistryError, match="E_UNKNOWN_NAME"):
        rollback(writer, "unknown", "prod", note=Note("why"))
