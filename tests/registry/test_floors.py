"""Floors: raised to what may be believed, taken away by their user alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts.signing import Trust
from specctl.errors import RegistryError
from specctl.registry import Package, promote, pull, push
from specctl.registry.entries import Note
from specctl.registry.floors import Floor
from tests.registry.pulls import PROD, code_of
from tests.registry.signed_chains import RECORD, add_junk, chain, signed, store
from tests.registry.worlds import NAME, HandClock, reader_in, registry_on
from tests.stores.memory import MemoryStore

__all__ = ["chain", "store"]  # fixtures


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


def test_another_entry_at_the_floor_is_refused_however_the_pull_ends(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    """A forked history may rest on an entry behind the floor; the one at the floor is compared."""
    floors, before = reader_in(tmp_path).floors, dict(store.kept)
    for _ in range(2):
        push(signed(store), chain, NAME)
    seen = registry_on(store).log(NAME)
    floors.raise_to(registry_on(store), seen.entries[2])
    floors.check(registry_on(store), seen)
    store.kept = before
    for _ in range(2):
        push(signed(store), chain, NAME)
    forked = registry_on(store).log(NAME)
    assert len(forked.entries) == len(seen.entries)
    assert code_of(floors.check, registry_on(store), forked) == "E_ROLLBACK"
