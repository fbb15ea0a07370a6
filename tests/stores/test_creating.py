"""Exclusive creation on stores that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from specctl.errors import StoreError
from specctl.stores import KeyTakenError, ObjectStore, create, creating, open_store, probe, s3
from specctl.stores.interface import MAX_REQUEST_S, TransientError, UnknownOutcomeError
from specctl.stores.probing import PROBE_KEY

pytestmark = pytest.mark.usefixtures("no_waits")


class Faulty:
    """A folder whose puts end as told: `lost` before, `late` after the bytes were stored."""

    def __init__(self, root: Path, outcomes: list[str]) -> None:
        self.inner, self.outcomes, self.url = open_store(root), outcomes, "faulty"
        self.objects, self.delete = self.inner.objects, self.inner.delete

    def put_new(self, key: str, data: bytes) -> None:
        outcome = self.outcomes.pop(0) if self.outcomes else "good"
        if outcome == "ignores the condition":
            self.inner.delete(key)
        if outcome != "lost":
            self.inner.put_new(key, data)
        if outcome in ("lost", "late"):
            raise UnknownOutcomeError(key, expected="an answer", found="a timeout", fix="retry")

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if self.outcomes and self.outcomes[0] == "unreadable":
            self.outcomes.pop(0)
            raise TransientError(key, expected="an answer", found="a timeout", fix="retry")
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


def test_no_put_is_begun_after_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection counts on it: what takes effect later may be deleted."""
    now_s, begun = [0.0], []
    store = Faulty(tmp_path, ["lost"] * 99)
    put = store.put_new

    def slow(key: str, data: bytes) -> None:
        begun.append(now_s[0])
        now_s[0] += MAX_REQUEST_S
        put(key, data)

    monkeypatch.setattr(store, "put_new", slow)
    monkeypatch.setattr(creating, "elapsed_s", lambda: now_s[0])
    with pytest.raises(UnknownOutcomeError):
        create(store, "a", b"mine")
    assert len(begun) == 4
    assert begun[-1] <= creating.LAST_TRY_S
    assert begun[-1] + MAX_REQUEST_S <= creating.MAX_CREATE_S
    assert timedelta(seconds=MAX_REQUEST_S) == s3.TIMEOUT + s3.CONNECT_TIMEOUT


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


def answering(how: str, store: ObjectStore) -> Callable[[str, bytes], None]:
    def put_new(key: str, data: bytes) -> None:
        if how == "taken, and overwrites":
            store.delete(key)
            store.put_new(key, data)
        raise KeyTakenError(key, expected="a free key", found="a taken one", fix="read")

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
    monkeypatch.setattr(refusing, "put_new", answering(how, store))
    with pytest.raises(StoreError, match="If-None-Match"):
        probe(refusing)


def test_a_store_that_creates_in_word_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the first put, keeps what was there, and refuses the second."""
    store = open_store(tmp_path)
    store.put_new(PROBE_KEY, b"of another probe")
    answers = [lambda _, __: None, answering("taken", store)]
    monkeypatch.setattr(store, "put_new", lambda key, data: answers.pop(0)(key, data))
    with pytest.raises(StoreError, match="overwrote it"):
        probe(store)


def test_a_store_that_overwrites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="overwrote"):
        probe(Faulty(tmp_path, ["ignores the condition"] * 99))


@pytest.mark.parametrize(
    "outcomes",
    [["lost"], ["late"], ["good", "late"], ["lost", "late", "lost"], ["good", "lost", "late"]],
    ids=" ".join,
)
def test_a_lost_answer_makes_no_good_store_unfit(tmp_path: Path, outcomes: list[str]) -> None:
    probe(Faulty(tmp_path, outcomes))


@pytest.mark.parametrize("lost", [["lost"], ["late"]], ids=" ".join)
def test_a_lost_answer_hides_no_store_that_overwrites(tmp_path: Path, lost: list[str]) -> None:
    with pytest.raises(StoreError, match="overwrote"):
        probe(Faulty(tmp_path, [*lost, *["ignores the condition"] * 9]))
