"""Floors: raised to what may be believed, taken away by their user alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts.registry import Author, Package, Writer, promote, pull, push, read_package
from specctl.artifacts.registry.entries import Note, Publish, write_entry
from specctl.artifacts.registry.floors import Floor
from specctl.artifacts.registry.layout import log_key
from specctl.artifacts.registry.log import commit
from specctl.artifacts.registry.trusting import CLOCK_SKEW_S
from specctl.artifacts.signing import SigningKey, Trust, TrustRecord, sign_artifact
from specctl.errors import RegistryError
from tests.artifacts.registry.test_pulling import GOLDEN, PROD, code_of, trusting
from tests.artifacts.registry.test_settings import NOBODY
from tests.artifacts.registry.worlds import (
    NAME,
    HandClock,
    MemoryStore,
    package,
    reader_in,
    registry_on,
    writer_on,
)

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


def test_an_unsigned_entry_raises_no_floor_where_signatures_are_asked_for(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    """The operator removes it and goes on: nobody is locked out."""
    reader = reader_in(tmp_path, Trust(RECORD))
    junk = add_junk(store)
    pull(registry_on(store), PROD, reader)
    assert [floor.generation for floor in reader.floors.known("memory")] == [1]
    store.delete(junk)
    push(signed(store), chain, NAME)
    pull(registry_on(store), PROD, reader)
    assert [floor.generation for floor in reader.floors.known("memory")] == [2]


def test_a_floor_is_as_new_as_the_newest_signed_entry(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    """Not only as the deciding ones: a version that was pushed since is not forgotten again."""
    reader, clock = reader_in(tmp_path, Trust(RECORD)), HandClock()
    until = Note(expires=HandClock(clock.now_s + 1).utc())
    push(signed(store, clock), chain, NAME, note=until)
    promote(signed(store, clock), NAME, "next", chain.digest, note=until)
    before = dict(store.kept)
    push(signed(store, clock), chain, NAME)  # the deciding publication has no expiry again
    promote(signed(store, clock), NAME, "next", chain.digest, note=until)
    clock.now_s += 2
    pull(registry_on(store, clock), PROD, reader)
    assert [floor.generation for floor in reader.floors.known("memory")] == [5]
    store.kept = before
    assert code_of(pull, registry_on(store, clock), PROD, reader) == "E_ROLLBACK"


def test_a_lower_floor_beside_a_higher_one_is_not_made(store: MemoryStore, tmp_path: Path) -> None:
    junk = add_junk(store)
    unsuspecting = reader_in(tmp_path)
    pull(registry_on(store), PROD, unsuspecting)
    assert [floor.generation for floor in unsuspecting.floors.known("memory")] == [2]
    pull(registry_on(store), PROD, reader_in(tmp_path, Trust(RECORD)))
    assert [floor.generation for floor in unsuspecting.floors.known("memory")] == [2]
    store.delete(junk)
    assert code_of(pull, registry_on(store), PROD, unsuspecting) == "E_ROLLBACK"


def test_a_floor_is_forgotten_with_a_reason_that_is_kept(
    store: MemoryStore, tmp_path: Path
) -> None:
    reader, junk = reader_in(tmp_path), add_junk(store)
    pull(registry_on(store), PROD, reader)
    store.delete(junk)
    with pytest.raises(RegistryError, match="specctl registry floors forget"):
        pull(registry_on(store), PROD, reader)
    [floor] = reader.floors.known("memory")
    assert floor == Floor(NAME, 2, floor.digest)
    for reason in ("", "two\nlines"):
        assert code_of(reader.floors.forget, "memory", NAME, reason) == "E_ENTRY"
    assert reader.floors.known("memory") == [floor]
    assert reader.floors.forget("memory", NAME, "ann removed junk") == [floor]
    [note] = reader.floors.forgotten("memory")
    assert (note.name, note.generations, note.digests) == (NAME, (2,), (floor.digest,))
    assert (note.reason, note.url) == ("ann removed junk", "memory")
    pull(registry_on(store), PROD, reader)
    assert [floor.generation for floor in reader.floors.known("memory")] == [1]
    assert code_of(reader.floors.forget, "memory", "other", "why") == "E_MISSING"
    assert list(reader.floors.forgotten("elsewhere")) == []


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"x" * 500, b"sha256:12"])
def test_a_damaged_floor_is_said_and_can_be_forgotten(
    store: MemoryStore, tmp_path: Path, data: bytes
) -> None:
    reader = reader_in(tmp_path)
    pull(registry_on(store), PROD, reader)
    [file] = (tmp_path / "floors").rglob("*/000000000001.json")
    file.chmod(0o600)
    file.write_bytes(data)
    assert code_of(pull, registry_on(store), PROD, reader) == "E_ROLLBACK"
    assert reader.floors.forget("memory", NAME, "a full disk") == []
    assert pull(registry_on(store), PROD, reader)


# ------------------------------------------------------------------ dates


THEN, UNTIL = "2020-02-01T00:00:00Z", "2020-06-01T00:00:00Z"


def until_2020(key: SigningKey, record: TrustRecord) -> TrustRecord:
    """The record with one more key, which has expired by the time of these registries."""
    line = trusting(key, "publisher", "promoter").keys[0]
    line = line.model_copy(update={"not_after": UNTIL})
    return record.model_copy(update={"keys": (*record.keys, line)})


def test_an_expired_key_does_not_sign_on_behind_others_by_an_old_date(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    old = SigningKey.generate()
    trust = Trust(until_2020(old, RECORD))
    then = HandClock(1_580_515_200.0)  # THEN, while the key was good
    statement = sign_artifact(old, chain.digest, NAME, created=THEN)
    stolen = Package(chain.digest, chain.files, (statement,))
    thief = Writer(registry_on(store, then), Author("thief", (old,)), Trust(NOBODY))
    push(thief, stolen, NAME)
    digest = PROD.pinned(chain.digest)
    assert code_of(pull, registry_on(store), digest, reader_in(tmp_path, trust)) == "E_SIG"
    promote(thief, NAME, "prod", chain.digest)  # of two in a row the second follows the first
    assert code_of(pull, registry_on(store), PROD, reader_in(tmp_path, trust)) == "E_SIG"
    push(signed(store), chain, NAME)  # now the version is sound again, the move is not
    assert code_of(pull, registry_on(store), PROD, reader_in(tmp_path, trust)) == "E_SIG"
    first = MemoryStore()  # where nobody else signed before, that cannot be told
    push(Writer(registry_on(first, then), Author("x", (old,)), Trust(NOBODY)), stolen, NAME)
    assert pull(registry_on(first), digest, reader_in(tmp_path / "2", trust))


def test_clocks_may_differ_and_a_wrong_one_stops_nobody(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    """An hour back is nothing; a day back is refused; a year ahead is passed over."""
    start = HandClock().now_s
    anew = Note(expires=HandClock(start + 1e8).utc())  # else the alias is there already
    promote(signed(store, HandClock(start - CLOCK_SKEW_S)), NAME, "prod", chain.digest, note=anew)
    assert pull(registry_on(store), PROD, reader_in(tmp_path, Trust(RECORD)))
    promote(signed(store, HandClock(start - 86_400)), NAME, "prod", chain.digest, note=anew)
    refused = reader_in(tmp_path / "1", Trust(RECORD))
    assert code_of(pull, registry_on(store), PROD, refused) == "E_SIG"
    promote(signed(store, HandClock(start + 3.2e7)), NAME, "next", chain.digest)
    add_junk(store, HandClock(start + 10 * CLOCK_SKEW_S))
    promote(signed(store, HandClock(start + 60)), NAME, "prod", chain.digest)
    now = registry_on(store, HandClock(start + 120))
    assert pull(now, PROD, reader_in(tmp_path / "2", Trust(RECORD)))


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
