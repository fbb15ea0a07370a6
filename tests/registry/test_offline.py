"""Offline: what was pulled under this name from this registry, by what is trusted today."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.signing import SigningKey, Trust, TrustRecord
from specctl.registry import (
    Author,
    Note,
    Package,
    Reader,
    Reference,
    promote,
    pull,
    pull_offline,
    push,
    read_package,
)
from specctl.registry.cache import MAX_NOTE_BYTES
from specctl.registry.entries import Publish
from specctl.registry.names import SETTINGS
from specctl.registry.state import NameState
from tests.registry.pulls import GOLDEN, PROD, code_of, signed_writer, trusting
from tests.registry.trust_records import NOBODY, revoked, settle
from tests.registry.worlds import NAME, HandClock, reader_in, registry_on, writer_on
from tests.stores.memory import MemoryStore

KEY = SigningKey.generate()
URL = "memory"
PROD_DIGEST = "sha256:" + "a" * 64


@pytest.fixture(scope="module")
def chain() -> Package:
    return read_package(GOLDEN / "chain")


@pytest.fixture
def store(chain: Package) -> MemoryStore:
    """A signed version, which `prod` points to; the same bytes unsigned as `scratch`."""
    store = MemoryStore()
    push(signed_writer(store, KEY), chain, NAME)
    promote(signed_writer(store, KEY), NAME, "prod", chain.digest)
    push(writer_on(store), chain, "scratch")
    return store


def as_user(folder: Path, record: TrustRecord) -> Reader:
    return reader_in(folder, Trust(record))


def test_a_digest_pulled_under_one_name_is_no_other_s(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    reader = as_user(tmp_path, trusting(KEY, "publisher", "promoter"))
    scratch = Reference("scratch", digest=chain.digest)
    pull(registry_on(store), scratch, reader)
    assert pull_offline(URL, scratch, reader).artifact.digest == chain.digest
    asked = Reference(NAME, digest=chain.digest)
    assert code_of(pull_offline, URL, asked, reader) == "E_OFFLINE"
    assert code_of(pull_offline, "s3://never/asked", scratch, reader) == "E_OFFLINE"
    pull(registry_on(store), PROD, reader)
    assert pull_offline(URL, asked, reader).artifact.digest == chain.digest, "by what prod was"


def test_a_note_moved_to_another_name_or_registry_is_refused(
    store: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    reader = as_user(tmp_path, NOBODY)
    scratch = Reference("scratch", digest=chain.digest)
    pull(registry_on(store), scratch, reader)
    asked = Reference(NAME, digest=chain.digest)
    for url, reference in ((URL, asked), ("elsewhere", asked)):
        place = reader.cache._note(url, reference)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(reader.cache._note(URL, scratch).read_bytes())
        assert code_of(pull_offline, url, reference, reader) == "E_OFFLINE"


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "sha256:" + "0" * 64},
        {"registry_id": "0" * 32},
        {"name": "other"},
        {"entries": []},
        {"settings": ["{}"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_note_that_contradicts_itself_is_refused(
    store: MemoryStore, tmp_path: Path, change: dict[str, Any]
) -> None:
    reader = as_user(tmp_path, NOBODY)
    pull(registry_on(store), PROD, reader)
    place = reader.cache._note(URL, PROD)
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"


def test_the_user_s_trust_of_today_counts(store: MemoryStore, tmp_path: Path) -> None:
    """Pulled with signatures; then the key is revoked, or another one is trusted instead."""
    record = trusting(KEY, "publisher", "promoter")
    pull(registry_on(store), PROD, as_user(tmp_path, record))
    assert pull_offline(URL, PROD, as_user(tmp_path, record))
    assert code_of(pull_offline, URL, PROD, as_user(tmp_path, revoked(record))) == "E_SIG"
    other = trusting(SigningKey.generate(), "publisher", "promoter")
    assert code_of(pull_offline, URL, PROD, as_user(tmp_path, other)) == "E_SIG"
    publisher = trusting(KEY, "publisher")
    assert code_of(pull_offline, URL, PROD, as_user(tmp_path, publisher)) == "E_SIG", "the move"


def test_what_was_pulled_unsigned_is_not_enough_once_signatures_are_asked_for(
    store: MemoryStore, tmp_path: Path
) -> None:
    pull(registry_on(store), PROD, as_user(tmp_path, NOBODY))
    assert pull_offline(URL, PROD, as_user(tmp_path, NOBODY))
    asks = trusting(KEY, "publisher", "promoter")
    assert code_of(pull_offline, URL, PROD, as_user(tmp_path, asks)) == "E_SIG"


def test_settings_of_the_registry_count_offline(store: MemoryStore, tmp_path: Path) -> None:
    root = SigningKey.generate()
    settle(store, trusting(KEY, "publisher", "promoter"), root)
    by_root = trusting(root, "root").model_copy(update={"require": ()})
    pull(registry_on(store), PROD, as_user(tmp_path, by_root))
    assert pull_offline(URL, PROD, as_user(tmp_path, by_root))
    other = trusting(SigningKey.generate(), "root")
    assert code_of(pull_offline, URL, PROD, as_user(tmp_path, other)) == "E_SIG"


def test_settings_of_a_note_are_settings(store: MemoryStore, tmp_path: Path) -> None:
    """Not another entry of that place which a key signed in another role."""
    reader = as_user(tmp_path, trusting(KEY, "publisher", "promoter"))
    pull(registry_on(store), PROD, reader)
    log = registry_on(store)._refreshed(SETTINGS, NameState)
    made = log.append(
        Publish(digest=PROD_DIGEST), Author("x", (KEY,)), created=HandClock().utc(), note=Note()
    )
    place = reader.cache._note(URL, PROD)
    note = json.loads(place.read_text()) | {"settings": [made.envelope.decode()]}
    place.write_text(json.dumps(note))
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"


def test_what_expired_since_is_refused(store: MemoryStore, chain: Package, tmp_path: Path) -> None:
    clock = HandClock()
    until = Note(expires=HandClock(clock.now_s + 10).utc())
    promote(writer_on(store, clock), NAME, "prod", chain.digest, note=until)
    reader = as_user(tmp_path, NOBODY)
    pull(registry_on(store, clock), PROD, reader)
    assert pull_offline(URL, PROD, reader, clock=clock)
    clock.now_s += 10
    assert code_of(pull_offline, URL, PROD, reader, clock=clock) == "E_STALE"


def linked(note: Path) -> None:
    elsewhere = note.with_name("elsewhere.json")
    note.rename(elsewhere)
    note.symlink_to(elsewhere)


def piped(note: Path) -> None:
    note.unlink()
    os.mkfifo(note)


def open_to_all(note: Path) -> None:
    note.chmod(0o666)


def endless(note: Path) -> None:
    with note.open("r+b") as file:
        file.truncate(MAX_NOTE_BYTES + 1)


@pytest.mark.parametrize("harm", [linked, piped, open_to_all, endless])
def test_a_note_that_somebody_else_may_have_put_there_is_not_read(
    store: MemoryStore, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    reader = as_user(tmp_path, NOBODY)
    pull(registry_on(store), PROD, reader)
    harm(reader.cache._note(URL, PROD))
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"


def test_the_owner_of_a_note_is_asked(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = as_user(tmp_path, NOBODY)
    pull(registry_on(store), PROD, reader)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"


def test_the_cache_is_closed_to_others(store: MemoryStore, tmp_path: Path) -> None:
    reader = as_user(tmp_path, NOBODY)
    reader.cache.root.mkdir(mode=0o755)
    pull(registry_on(store), PROD, reader)
    folders = [path for path in reader.cache.root.rglob("*") if path.is_dir()]
    assert len(folders) > 5
    assert {path.stat().st_mode & 0o777 for path in (reader.cache.root, *folders)} == {0o700}
