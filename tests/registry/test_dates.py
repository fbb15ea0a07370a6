"""Dates of signed entries: an expired key signs no more, and a wrong clock stops nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts.signing import SigningKey, Trust, TrustRecord, sign_artifact
from specctl.errors import ArtifactError
from specctl.registry import Author, Package, Writer, promote, pull, push
from specctl.registry.entries import Note, Publish
from specctl.registry.fsck import fsck, verify
from specctl.registry.log import commit
from specctl.registry.names import parse_reference
from specctl.registry.trusting import CLOCK_SKEW_S
from specctl.registry.views import candidates
from tests.registry.pulls import PROD, code_of, trusting
from tests.registry.signed_chains import KEY, RECORD, add_junk, chain, signed, store
from tests.registry.trust_records import NOBODY
from tests.registry.worlds import NAME, HandClock, reader_in, registry_on, writer_on
from tests.stores.memory import MemoryStore

__all__ = ["chain", "store"]  # fixtures

THEN, UNTIL = "2020-02-01T00:00:00Z", "2020-06-01T00:00:00Z"
NEXT = parse_reference(f"{NAME}@next")


def ending(key: SigningKey, record: TrustRecord, until: str) -> TrustRecord:
    """The record with one more key, which ends some time."""
    line = trusting(key, "publisher", "promoter").keys[0]
    line = line.model_copy(update={"not_after": until})
    return record.model_copy(update={"keys": (*record.keys, line)})


def unasked(store: MemoryStore, clock: HandClock, key: SigningKey) -> Writer:
    """Somebody who signs, and whom the own trust file does not stop."""
    return Writer(registry_on(store, clock), Author("old", (key,)), Trust(NOBODY))


def test_an_expired_key_does_not_sign_on_behind_others_by_an_old_date(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    old = SigningKey.generate()
    trust = Trust(ending(old, RECORD, UNTIL))
    then = HandClock(1_580_515_200.0)  # THEN, while the key was good
    statement = sign_artifact(old, chain.digest, NAME, created=THEN)
    stolen = Package(chain.digest, chain.files, (statement,))
    thief = unasked(store, then, old)
    push(thief, stolen, NAME)
    digest = PROD.pinned(chain.digest)
    assert code_of(pull, registry_on(store), digest, reader_in(tmp_path, trust)) == "E_SIG"
    promote(thief, NAME, "prod", chain.digest)  # of two in a row the second follows the first
    assert code_of(pull, registry_on(store), PROD, reader_in(tmp_path, trust)) == "E_SIG"
    push(signed(store), chain, NAME)  # now the version is sound again, the move is not
    assert code_of(pull, registry_on(store), PROD, reader_in(tmp_path, trust)) == "E_SIG"
    first = MemoryStore()  # where nobody else signed before, that cannot be told
    push(unasked(first, then, old), stolen, NAME)
    assert pull(registry_on(first), digest, reader_in(tmp_path / "2", trust))


def test_an_expired_key_raises_no_floor_by_an_old_date(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    """Else who pulled meanwhile would be locked out once the operator has removed its entry."""
    old = SigningKey.generate()
    reader = reader_in(tmp_path, Trust(ending(old, RECORD, UNTIL)))
    before = dict(store.kept)
    promote(unasked(store, HandClock(1_580_515_200.0), old), NAME, "next", chain.digest)
    assert len(store.kept) > len(before)
    pull(registry_on(store), PROD, reader)
    store.kept = before
    pull(registry_on(store), PROD, reader)


def test_every_reader_and_writer_gives_the_verdict_of_a_pull(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    """`fsck`, `verify`, a search and a promotion refuse the entries that a pull refuses."""
    old = SigningKey.generate()
    trust, registry = Trust(ending(old, RECORD, UNTIL)), registry_on(store)
    then = HandClock(1_580_515_200.0)
    promote(unasked(store, then, old), NAME, "next", chain.digest)
    assert code_of(pull, registry, NEXT, reader_in(tmp_path, trust)) == "E_SIG"
    assert [one.code for one in verify(registry, NEXT, trust)] == ["E_SIG"]
    assert [one.place for one in fsck(registry, trust)] == [f"{NAME}@next, generation 2"]
    refusals = {one.reference: one.refusal for one in candidates(registry, trust, pytest.fail)}
    assert refusals.pop(str(PROD)) is None, "its own entries are sound"
    [(reference, refusal)] = refusals.items()
    assert reference == str(NEXT)
    assert refusal is not None
    assert "E_SIG" in refusal
    good = Writer(registry, Author("ann", (KEY,)), trust)
    push(unasked(store, then, old), chain, NAME)
    assert code_of(promote, good, NAME, "other", chain.digest) == "E_SIG"
    push(good, chain, NAME)
    assert promote(good, NAME, "next", chain.digest).changed, "what readers refuse is renewed"
    assert list(fsck(registry, trust)) == []
    assert pull(registry, NEXT, reader_in(tmp_path, trust))


@pytest.mark.parametrize("late_s", [0, CLOCK_SKEW_S, CLOCK_SKEW_S + 1])
def test_an_hour_behind_the_end_of_a_key_is_the_clock(
    chain: Package, tmp_path: Path, late_s: int
) -> None:
    """Signed in time, behind an entry that somebody else dated so long after the key's end."""
    end, old, store = HandClock(), SigningKey.generate(), MemoryStore()
    trust = Trust(ending(old, RECORD, end.utc()))
    push(signed(store, HandClock(end.now_s + late_s)), chain, NAME)
    promote(unasked(store, end, old), NAME, "prod", chain.digest)
    now = registry_on(store, HandClock(end.now_s + 1e6))
    if late_s <= CLOCK_SKEW_S:
        assert pull(now, PROD, reader_in(tmp_path, trust))
    else:
        with pytest.raises(ArtifactError, match=f"expired {end.utc()}.*behind entries of") as late:
            pull(now, PROD, reader_in(tmp_path, trust))
        assert late.value.code == "E_SIG"


@pytest.mark.parametrize("ahead_h", [3, 24 * 365])
def test_one_push_from_a_clock_that_is_ahead_stops_nobody_then_or_later(
    store: MemoryStore, chain: Package, tmp_path: Path, ahead_h: float
) -> None:
    start = HandClock().now_s
    push(signed(store, HandClock(start + ahead_h * 3600)), chain, NAME)
    promote(signed(store, HandClock(start + 60)), NAME, "next", chain.digest)
    reader = reader_in(tmp_path, Trust(RECORD))
    for later_h in (0.0, 1.0, 2.0, ahead_h, 24.0 * 800):
        now = HandClock(start + 60 + later_h * 3600)
        assert pull(registry_on(store, now), NEXT, reader)


def test_unsigned_entries_and_those_of_the_future_end_no_key_sooner(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    end, old = HandClock(HandClock().now_s + 1e5), SigningKey.generate()
    trust = Trust(ending(old, RECORD, end.utc()))
    far = HandClock(end.now_s + 1e8)
    push(signed(store, far), chain, NAME)
    add_junk(store, HandClock(end.now_s + 1e5))
    promote(unasked(store, end, old), NAME, "next", chain.digest)
    now = registry_on(store, HandClock(end.now_s + 2e5))
    push(signed(store, HandClock(end.now_s + 1)), chain, NAME)
    assert pull(now, NEXT, reader_in(tmp_path, trust))


def test_dates_of_unsigned_registries_are_nobody_s_business(tmp_path: Path, chain: Package) -> None:
    store = MemoryStore()
    push(writer_on(store), chain, NAME)
    commit(
        registry_on(store).log(NAME),
        lambda _: Publish(digest=chain.digest),
        Author("b"),
        now=lambda: "2001-01-01T00:00:00Z",
    )
    assert pull(registry_on(store), PROD.pinned(chain.digest), reader_in(tmp_path))


def test_a_version_whose_publication_has_expired_is_not_pointed_to(
    store: MemoryStore, chain: Package
) -> None:
    clock = HandClock()
    push(signed(store, clock), chain, NAME, note=Note(expires=HandClock(clock.now_s + 1).utc()))
    before = len(registry_on(store).log(NAME).entries)
    clock.now_s += 2
    assert code_of(promote, signed(store, clock), NAME, "next", chain.digest) == "E_STALE"
    assert len(registry_on(store).log(NAME).entries) == before
