"""Exclusive creation on stores that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specctl.errors import StoreError
from specctl.stores import (
    PROBE_KEY,
    KeyTakenError,
    TransientError,
    UnknownOutcomeError,
    create,
    creating,
    open_store,
    probe,
)

pytestmark = pytest.mark.usefixtures("no_waits")


class Faulty:
    """A folder whose puts end as told: `lost` before, `late` after the bytes were stored."""

    def __init__(self, root: Path, outcomes: list[str]) -> None:
        self.inner, self.outcomes, self.url = open_store(root), outcomes, "faulty"
        self.objects, self.root = self.inner.objects, root

    def put_new(self, key: str, data: bytes) -> None:
        outcome = self.outcomes.pop(0) if self.outcomes else "good"
        if outcome == "ignores the condition":
            (self.root / key).unlink(missing_ok=True)
        if outcome != "lost":
            self.inner.put_new(key, data)
        if outcome in ("lost", "late"):
            raise UnknownOutcomeError(f"{key}: expected an answer, found a timeout", hint="retry")

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if self.outcomes and self.outcomes[0] == "unreadable":
            self.outcomes.pop(0)
            raise TransientError(f"{key}: expected an answer, found a timeout", hint="retry")
        return self.inner.get(key, max_bytes=max_bytes)


@pytest.mark.parametrize(
    "outcomes",
    [["lost"], ["late"], ["lost", "late"], ["late", "unreadable"], ["lost", "unreadable", "late"]],
    ids=" ".join,
)
def test_an_unknown_outcome_is_resolved_by_reading(tmp_path: Path, outcomes: list[str]) -> None:
    store = Faulty(tmp_path, outcomes)
    create(store, "a", b"mine")
    assert store.get("a", max_bytes=9) == b"mine"


@pytest.mark.parametrize("outcome", ["lost", "late"])
def test_an_unknown_outcome_never_hides_another_winner(tmp_path: Path, outcome: str) -> None:
    store = Faulty(tmp_path, [outcome] if outcome == "lost" else [])
    store.inner.put_new("a", b"another's")
    with pytest.raises(KeyTakenError):
        create(store, "a", b"mine")


def test_endless_trouble_ends_in_an_unknown_outcome(tmp_path: Path) -> None:
    with pytest.raises(UnknownOutcomeError):
        create(Faulty(tmp_path, ["lost"] * 99), "a", b"mine")


def test_tries_are_further_and_further_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(creating, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(creating.time, "sleep", waits.append)
    create(Faulty(tmp_path, ["lost"] * 5), "a", b"mine")
    longest = [0.05, 0.1, 0.2, 0.4, 0.8]
    assert len(waits) == len(longest)
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))


def answering(how: str, root: Path) -> Callable[[str, bytes], None]:
    def put_new(key: str, data: bytes) -> None:
        if how == "taken, and overwrites":
            (root / key).write_bytes(data)
        raise KeyTakenError(f"{key}: expected a free key, found a taken one", hint="read")

    return put_new


@pytest.mark.parametrize("there", [b"", b"0123456789abcdef"], ids=["new", "probed before"])
def test_a_store_that_calls_every_key_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bytes
) -> None:
    """As a gateway does that answers 409, 412 or 304 to all puts."""
    how = "taken, and overwrites" if there else "taken"
    store = open_store(tmp_path)
    if there:
        store.put_new(PROBE_KEY, there)
    refusing = open_store(tmp_path)
    monkeypatch.setattr(refusing, "put_new", answering(how, tmp_path))
    with pytest.raises(StoreError, match="If-None-Match"):
        probe(refusing)


def test_a_store_that_creates_in_word_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the first put, keeps what was there, and refuses the second."""
    store = open_store(tmp_path)
    store.put_new(PROBE_KEY, b"of another probe")
    answers = [lambda _, __: None, answering("taken", tmp_path)]
    monkeypatch.setattr(store, "put_new", lambda key, data: answers.pop(0)(key, data))
    with pytest.raises(StoreError, match="overwrote it"):
        probe(store)


@pytest.mark.parametrize(
    "outcomes",
    [["lost"], ["late"], ["good", "late"], ["lost", "late", "lost"], ["good", "lost", "late"]],
    ids=" ".join,
)
def test_a_lost_answer_makes_no_good_store_unfit(tmp_path: Path, outcomes: list[str]) -> None:
    store = Faulty(tmp_path, outcomes)
    probe(store)
    assert store.outcomes == [], "it did not go on until it knew"
    assert store.get(PROBE_KEY, max_bytes=99)


@pytest.mark.parametrize("lost", [[], ["lost"], ["late"]], ids=" ".join)
def test_a_lost_answer_hides_no_store_that_overwrites(tmp_path: Path, lost: list[str]) -> None:
    with pytest.raises(StoreError, match="overwrote"):
        probe(Faulty(tmp_path, [*lost, *["ignores the condition"] * 9]))
