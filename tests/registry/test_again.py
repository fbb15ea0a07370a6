"""Bytes pushed again, moves that a reader does not accept, histories that became shorter."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specctl.artifacts.signing import SigningKey
from specctl.registry import (
    Package,
    Reader,
    Registry,
    Writer,
    parse_reference,
    promote,
    pull,
    push,
    resolve,
    rollback,
)
from specctl.registry.listing import name_rows, version_rows
from specctl.registry.log import LOGS, Pointer, entry_key
from specctl.registry.names import segment_of
from specctl.registry.trust import Trust
from specctl.registry.verifying import verify
from specctl.stores import ObjectStore
from tests.registry.worlds import (
    NAME,
    PROD,
    Dying,
    Killed,
    Overtaken,
    code_of,
    package,
    reader_in,
    registry_on,
    trusting,
    writer_on,
)
from tests.stores.memory import MemoryStore

Real = tuple[Package, Package]
KEY, STRANGER = SigningKey.generate(), SigningKey.generate()
RECORD = trusting(KEY)
V1 = parse_reference(f"{NAME}@v1")
ONE, TWO = package("one"), package("two")


@pytest.fixture
def store(real: Real) -> MemoryStore:
    """Two versions and `prod`, at the first, all signed."""
    store = MemoryStore()
    for one in real:
        push(good(store), one, NAME)
    promote(good(store), NAME, "prod", real[0].digest)
    return store


def good(store: ObjectStore) -> Writer:
    return writer_on(store, KEY, trust=RECORD)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return reader_in(tmp_path, RECORD)


def num_entries(store: ObjectStore) -> int:
    return len(registry_on(store).log(NAME).entries)


# ------------------------------------------------------------------ pushed again


@pytest.mark.parametrize("key", [STRANGER, None], ids=["an untrusted key", "no key"])
def test_a_push_of_known_bytes_changes_no_version(
    store: MemoryStore, real: Real, reader: Reader, key: SigningKey | None
) -> None:
    """By someone who trusts nobody, so that nothing of it is refused."""
    shown = version_rows(registry_on(store).log(NAME), RECORD)
    for _ in range(2):
        again = push(writer_on(store, key), real[0], NAME)
        assert (again.number, again.is_new) == (1, False)
    assert num_entries(store) == 3 + (key is not None)
    for reference in (V1, PROD):
        assert pull(registry_on(store), reference, reader).artifact.digest == real[0].digest
    assert promote(good(store), NAME, "next", real[0].digest).changed
    assert verify(registry_on(store), RECORD).findings == []
    [first, second] = version_rows(registry_on(store).log(NAME), RECORD)
    assert [first | {"aliases": ["prod"]}, second] == shown, "with the date of the first one"


def test_a_key_signs_a_version_once(store: MemoryStore, real: Real) -> None:
    before = dict(store.kept)
    assert not push(good(store), real[0], NAME).changed
    assert store.kept == before
    push(writer_on(store), package("unsigned"), NAME)
    signed = push(good(store), package("unsigned"), NAME)
    assert (signed.number, signed.is_new, signed.changed) == (3, False, True)
    assert not push(good(store), package("unsigned"), NAME).changed
    assert verify(registry_on(store), RECORD).findings == []


def test_a_push_after_a_killed_one_is_the_same_version() -> None:
    counted = Dying(MemoryStore())
    push(writer_on(counted, KEY), ONE, NAME)
    assert counted.num_calls > 8
    for dies_at in range(counted.num_calls):
        store = MemoryStore()
        with pytest.raises(Killed):
            push(writer_on(Dying(store, dies_at, is_after=True), KEY), ONE, NAME)
        for key in (KEY, None, STRANGER):
            push(writer_on(store, key), TWO, NAME)
            push(writer_on(store, key), ONE, NAME)
        found = registry_on(store).log(NAME)
        first = found.entries[0].entry.action.digest
        assert found.state.versions.keys() == {ONE.digest, TWO.digest}
        assert next(iter(found.state.versions)) == first
        assert len(found.entries) == 4, "one for each version and key"


def test_of_two_first_pushes_of_the_same_bytes_one_makes_the_version() -> None:
    store = MemoryStore()
    slow = Overtaken(store, lambda bob: push(bob, ONE, NAME))
    late = push(writer_on(slow), ONE, NAME)
    assert (late.number, late.is_new, late.changed) == (1, False, False)
    assert num_entries(store) == 1


# ------------------------------------------------------------------ moves that do not count


@pytest.mark.parametrize("key", [STRANGER, None], ids=["an untrusted key", "no key"])
def test_the_last_accepted_move_counts(
    store: MemoryStore,
    real: Real,
    reader: Reader,
    key: SigningKey | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mallory = writer_on(store, key, actor="mallory")
    promote(mallory, NAME, "prod", real[1].digest)
    with caplog.at_level(logging.WARNING):
        assert pull(registry_on(store), PROD, reader).artifact.digest == real[0].digest
    assert "generation 3 moved it" in caplog.text
    assert "does not count" in caplog.text
    anybody = resolve(registry_on(store), PROD, Trust())
    assert (anybody.digest, anybody.ignored) == (real[1].digest, None)
    for rows in (
        name_rows(registry_on(store), RECORD)[0]["aliases"].items(),
        [("prod", row["digest"]) for row in version_rows(registry_on(store).log(NAME), RECORD)[:1]],
    ):
        assert list(rows) == [("prod", real[0].digest)]
    assert verify(registry_on(store), RECORD).findings == []
    again = promote(good(store), NAME, "prod", real[0].digest, expect=real[0].digest)
    assert again.changed, "for readers who require no signature"
    assert not promote(good(store), NAME, "prod", real[0].digest).changed


def test_a_rollback_passes_over_moves_that_do_not_count(store: MemoryStore, real: Real) -> None:
    """Though somebody moved the alias before it and meanwhile."""
    promote(good(store), NAME, "prod", real[1].digest)
    third = package("third")
    push(writer_on(store), third, NAME)
    promote(writer_on(store), NAME, "prod", third.digest)
    slow = Overtaken(store, lambda bob: promote(bob, NAME, "prod", real[0].digest))
    assert rollback(good(slow), NAME, "prod", reason="slow", expect=real[1].digest).changed
    found = registry_on(store).log(NAME)
    assert found.accepted(RECORD).aliases["prod"] == Pointer(real[0].digest, 7)
    assert code_of(rollback, good(store), NAME, "prod", reason="slow") == "E_NO_PREVIOUS"


def test_another_trust_file_is_another_verdict_on_the_same_history(store: MemoryStore) -> None:
    log = registry_on(store).log(NAME)
    for trust, num_versions in ((RECORD, 2), (trusting(STRANGER), 0), (RECORD, 2), (Trust(), 2)):
        assert len(log.accepted(trust).versions) == num_versions


# ------------------------------------------------------------------ histories cut short


def seen_by(store: MemoryStore, home: Path) -> Registry:
    registry = registry_on(store)
    registry.home = lambda: home
    return registry


def cut(store: MemoryStore) -> None:
    store.delete(entry_key(NAME, 2))


def remove(store: MemoryStore) -> None:
    for generation in range(3):
        store.delete(entry_key(NAME, generation))


def cut_and_write_on(store: MemoryStore) -> None:
    """A signed history can be cut by whoever may delete, and then grow again, also with a key."""
    cut(store)
    for word in ("three", "four"):
        push(good(store), package(word), NAME)


CUTS = {
    "the last entry deleted": (cut, "ends at generation 1"),
    "all deleted": (remove, "it is gone"),
    "written on": (cut_and_write_on, "another entry there"),
}


@pytest.mark.parametrize("harm", CUTS)
def test_a_history_without_what_was_seen_is_refused(
    store: MemoryStore, real: Real, reader: Reader, tmp_path: Path, harm: str
) -> None:
    assert pull(seen_by(store, tmp_path), PROD, reader)
    CUTS[harm][0](store)
    before = dict(store.kept)
    for reference in (PROD, V1):
        assert code_of(pull, seen_by(store, tmp_path), reference, reader) == "E_LOG"
    [found] = verify(seen_by(store, tmp_path), RECORD).findings
    assert (found.code, CUTS[harm][1] in found.found) == ("E_LOG", True)
    assert f"{LOGS}/{segment_of(NAME)}" in found.place
    writer = Writer(seen_by(store, tmp_path), RECORD, "ann", KEY)
    assert code_of(push, writer, real[0], NAME) == "E_LOG"
    assert code_of(promote, writer, NAME, "prod", real[1].digest) == "E_LOG"
    assert store.kept == before
    assert verify(seen_by(store, tmp_path / "another"), RECORD).findings == [], "never saw it"


def test_an_older_log_is_refused_until_it_is_whole_again(
    store: MemoryStore, real: Real, reader: Reader, tmp_path: Path
) -> None:
    older = dict(store.kept)
    writer = Writer(seen_by(store, tmp_path), RECORD, "ann", KEY)
    promote(writer, NAME, "prod", real[1].digest)
    newer, store.kept = store.kept, older
    assert code_of(pull, seen_by(store, tmp_path), PROD, reader) == "E_LOG", "the writer saw it"
    store.kept = newer
    assert pull(seen_by(store, tmp_path), PROD, reader).artifact.digest == real[1].digest
    rollback(good(store), NAME, "prod", reason="slow")
    assert pull(seen_by(store, tmp_path), PROD, reader).artifact.digest == real[0].digest
    store.kept = older
    elsewhere = seen_by(store, tmp_path)
    assert "generation 4" in str(verify(elsewhere, RECORD).findings[0].found)
    [note] = tmp_path.glob("histories/*/*.json")
    note.unlink()
    assert pull(elsewhere, PROD, reader).artifact.digest == real[0].digest, "the loss is accepted"


HARMS: dict[str, Callable[[Path], object]] = {
    "a link": lambda note: note.symlink_to(note.rename(note.with_name("elsewhere"))),
    "a pipe": lambda note: (note.unlink(), os.mkfifo(note)),
    "open to all": lambda note: note.chmod(0o666),
    "another form": lambda note: note.write_bytes(b"{}"),
    "endless": lambda note: note.write_bytes(b" " * 5000),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_note_that_proves_nothing_is_refused(
    store: MemoryStore, reader: Reader, tmp_path: Path, harm: str
) -> None:
    pull(seen_by(store, tmp_path), PROD, reader)
    [note] = tmp_path.glob("histories/*/*.json")
    HARMS[harm](note)
    assert code_of(pull, seen_by(store, tmp_path), PROD, reader) == "E_LOG"


def test_a_history_that_grows_while_it_is_read_is_whole(
    store: MemoryStore, reader: Reader, tmp_path: Path
) -> None:
    """Another process of the same user writes and remembers between two steps of this one."""
    registry = seen_by(store, tmp_path)
    pull(registry, PROD, reader)
    refresh = registry.log(NAME).refresh

    def overtaken() -> None:
        refresh()
        push(Writer(seen_by(store, tmp_path), RECORD, "ann", KEY), package("meanwhile"), NAME)

    registry.log(NAME).refresh = overtaken  # type: ignore[method-assign]
    assert pull(registry, PROD, reader)
    pull(registry, PROD, reader)
    assert seen_by(store, tmp_path).log(NAME).entries[3:], "the newer one stays remembered"
