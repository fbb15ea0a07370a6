"""Exclusive creation on stores that misbehave."""

from __future__ import annotations

import pytest

from specctl.errors import StoreError
from specctl.stores import (
    PROBE_KEY,
    KeyTakenError,
    UnknownOutcomeError,
    create,
    probe,
)
from tests.stores.memory import MemoryStore, Unsure

pytestmark = pytest.mark.usefixtures("no_waits")


@pytest.mark.parametrize(
    "outcomes",
    [["lost"], ["late"], ["lost", "late"], ["late", "unreadable"], ["lost", "unreadable", "late"]],
    ids=" ".join,
)
def test_an_unknown_outcome_is_resolved_by_reading(outcomes: list[str]) -> None:
    store = Unsure(MemoryStore(), outcomes)
    create(store, "a", b"mine")
    assert store.get("a", max_bytes=9) == b"mine"


@pytest.mark.parametrize("outcome", ["lost", "late"])
def test_an_unknown_outcome_never_hides_another_winner(outcome: str) -> None:
    store = Unsure(MemoryStore(), [outcome] if outcome == "lost" else [])
    store.inner.put_new("a", b"another's")
    with pytest.raises(KeyTakenError):
        create(store, "a", b"mine")


def test_endless_trouble_ends_in_an_unknown_outcome() -> None:
    with pytest.raises(UnknownOutcomeError):
        create(Unsure(MemoryStore(), ["lost"] * 99), "a", b"mine")


def taken(key: str, _: bytes) -> None:
    raise KeyTakenError(f"{key}: expected a free key, found a taken one", hint="read")


@pytest.mark.parametrize("there", [b"", b"0123456789abcdef"], ids=["new", "probed before"])
def test_a_store_that_calls_every_key_taken_is_refused(
    monkeypatch: pytest.MonkeyPatch, there: bytes
) -> None:
    """As a gateway does that answers 409, 412 or 304 to all puts, and may overwrite too."""
    store = MemoryStore()

    def overwrites(key: str, data: bytes) -> None:
        store.kept[key] = data
        taken(key, data)

    if there:
        store.kept[PROBE_KEY] = there
    monkeypatch.setattr(store, "put_new", overwrites if there else taken)
    with pytest.raises(StoreError, match="If-None-Match"):
        probe(store)


def test_a_store_that_creates_in_word_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the first put, keeps what was there, and refuses the second."""
    store = MemoryStore()
    store.kept[PROBE_KEY] = b"of another probe"
    answers = iter([lambda *_: None, taken])
    monkeypatch.setattr(store, "put_new", lambda key, data: next(answers)(key, data))
    with pytest.raises(StoreError, match="overwrote the key"):
        probe(store)


@pytest.mark.parametrize(
    "outcomes",
    [["lost"], ["late"], ["good", "late"], ["lost", "late", "lost"], ["good", "lost", "late"]],
    ids=" ".join,
)
def test_a_lost_answer_makes_no_good_store_unfit(outcomes: list[str]) -> None:
    store = Unsure(MemoryStore(), outcomes)
    probe(store)
    assert store.outcomes == [], "it did not go on until it knew"
    assert store.get(PROBE_KEY, max_bytes=99)


@pytest.mark.parametrize("lost", [[], ["lost"], ["late"]], ids=" ".join)
def test_a_lost_answer_hides_no_store_that_overwrites(lost: list[str]) -> None:
    with pytest.raises(StoreError, match="overwrote"):
        probe(Unsure(MemoryStore(), [*lost, *["overwrites"] * 9]))
