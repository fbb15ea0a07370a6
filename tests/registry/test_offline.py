"""Offline: what was pulled under this name from this registry, by today's trust file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.signing import SigningKey
from specctl.registry import Note, Package, Reader, Reference, promote, pull, pull_offline, push
from specctl.registry.pulling import MAX_NOTE_BYTES
from specctl.registry.trust import Revocation, Trust
from tests.artifacts.examples import PAIR
from tests.registry.worlds import (
    NAME,
    PROD,
    HandClock,
    code_of,
    reader_in,
    registry_on,
    trusting,
    writer_on,
)
from tests.stores.memory import MemoryStore

KEY = SigningKey.generate()
RECORD, URL = trusting(KEY), MemoryStore.url


@pytest.fixture
def chain(real: tuple[Package, Package]) -> Package:
    return real[0]


@pytest.fixture
def store(chain: Package) -> MemoryStore:
    """A signed version, which `prod` points to; the same bytes unsigned as `scratch`."""
    store = MemoryStore()
    push(writer_on(store, None, KEY), chain, NAME)
    promote(writer_on(store, None, KEY), NAME, "prod", chain.digest)
    push(writer_on(store), chain, "scratch")
    return store


@pytest.fixture
def reader(store: MemoryStore, tmp_path: Path) -> Reader:
    """A user without a trust file who pulled `prod`."""
    reader = reader_in(tmp_path)
    pull(registry_on(store), PROD, reader)
    return reader


def test_the_cache_is_checked_again(store: MemoryStore, chain: Package, tmp_path: Path) -> None:
    reader, clock = reader_in(tmp_path), HandClock()
    registry = registry_on(store, clock)
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"
    pull(registry, PROD, reader)
    pulled = pull_offline(URL, PROD, reader, expect=PAIR)
    assert (pulled.artifact.digest, pulled.remembered) == (chain.digest, clock())
    card = pulled.folder / "README.md"
    card.chmod(0o600)
    card.write_bytes(card.read_bytes() + b"!")
    assert code_of(pull_offline, URL, PROD, reader) == "E_DIGEST"
    assert code_of(pull, registry, PROD, reader) == "E_DIGEST"


def test_a_digest_pulled_under_one_name_is_no_other_name_s(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    reader = reader_in(tmp_path, RECORD)
    scratch, own = (Reference(name, digest=chain.digest) for name in ("scratch", NAME))
    pull(registry_on(store), scratch, reader)
    assert pull_offline(URL, scratch, reader).artifact.digest == chain.digest
    assert code_of(pull_offline, URL, own, reader) == "E_OFFLINE"
    assert code_of(pull_offline, "s3://never/asked", scratch, reader) == "E_OFFLINE"
    for url, reference in ((URL, own), ("elsewhere", own)):
        place = reader.cache._note(url, reference)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(reader.cache._note(URL, scratch).read_bytes())
        assert code_of(pull_offline, url, reference, reader) == "E_OFFLINE", "a moved note"
    pull(registry_on(store), PROD, reader)
    assert pull_offline(URL, own, reader).artifact.digest == chain.digest, "by the version of prod"


NOTES: dict[str, Callable[[list[str], list[str]], dict[str, Any]]] = {
    "no entries": lambda own, other: {"entries": []},
    "no entry": lambda own, other: {"entries": ["{}"]},
    "another field": lambda own, other: {"more": 1},
    "the publication alone": lambda own, other: {"entries": own[:1]},
    "the move alone": lambda own, other: {"entries": own[1:]},
    "the wrong order": lambda own, other: {"entries": own[::-1]},
    "a publication elsewhere": lambda own, other: {"entries": [other[0], own[1]]},
    "a move elsewhere": lambda own, other: {"entries": [own[0], other[1]]},
}


@pytest.mark.parametrize("case", NOTES)
def test_a_note_that_contradicts_itself_is_refused(
    case: str, reader: Reader, chain: Package, tmp_path: Path
) -> None:
    elsewhere, other = MemoryStore(), reader_in(tmp_path / "other")
    push(writer_on(elsewhere, None, KEY), chain, NAME)
    promote(writer_on(elsewhere, None, KEY), NAME, "prod", chain.digest)
    pull(registry_on(elsewhere), PROD, other)
    place, theirs = (one.cache._note(URL, PROD) for one in (reader, other))
    note = json.loads(place.read_text())
    change = NOTES[case](note["entries"], json.loads(theirs.read_text())["entries"])
    place.write_text(json.dumps(note | change))
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"


def test_the_trust_file_of_today_counts(store: MemoryStore, tmp_path: Path) -> None:
    """Pulled with signatures; then the key is revoked, or another one is trusted instead."""
    pull(registry_on(store), PROD, reader_in(tmp_path, RECORD))
    assert pull_offline(URL, PROD, reader_in(tmp_path, RECORD))
    stolen = Revocation(at="2026-01-01T00:00:00Z", reason="stolen")
    revoked = RECORD.keys[0].model_copy(update={"revoked": stolen})
    others: list[Trust] = [
        RECORD.model_copy(update={"keys": (revoked,)}),
        trusting(SigningKey.generate()),
        trusting(KEY, "publisher"),  # of the artifact, not of the move
    ]
    for record in others:
        assert code_of(pull_offline, URL, PROD, reader_in(tmp_path, record)) == "E_SIG"


def test_an_expired_entry_is_refused(store: MemoryStore, chain: Package, tmp_path: Path) -> None:
    clock, reader = HandClock(), reader_in(tmp_path)
    until = Note(expires=clock.after(10)())
    promote(writer_on(store, clock), NAME, "prod", chain.digest, note=until)
    pull(registry_on(store, clock), PROD, reader)
    assert pull_offline(URL, PROD, reader, now=clock)
    assert code_of(pull_offline, URL, PROD, reader, now=clock.after(10)) == "E_STALE"


HARMS: dict[str, Callable[[Path], object]] = {
    "a link": lambda note: note.symlink_to(note.rename(note.with_name("elsewhere.json"))),
    "a pipe": lambda note: (note.unlink(), os.mkfifo(note)),
    "open to all": lambda note: note.chmod(0o666),
    "endless": lambda note: os.truncate(note, MAX_NOTE_BYTES + 1),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_note_that_another_user_may_have_put_there_is_not_read(reader: Reader, harm: str) -> None:
    assert pull_offline(URL, PROD, reader)
    HARMS[harm](reader.cache._note(URL, PROD))
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"


def test_a_note_of_another_owner_or_without_the_signatures_of_today_is_not_read(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_of(pull_offline, URL, PROD, reader_in(tmp_path, RECORD)) == "E_SIG"
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"


def test_the_cache_is_closed_to_others(store: MemoryStore, tmp_path: Path) -> None:
    reader = reader_in(tmp_path)
    reader.cache.root.mkdir(mode=0o755)
    pull(registry_on(store), PROD, reader)
    folders = [path for path in reader.cache.root.rglob("*") if path.is_dir()]
    assert len(folders) > 5
    assert {path.stat().st_mode & 0o777 for path in (reader.cache.root, *folders)} == {0o700}
