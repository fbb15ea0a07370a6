"""A pull: what a reference means now, signed where the trust file asks for it, in time.

Offline: what was pulled under this name from this registry, by today's trust file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.signing import SigningKey, sign_artifact
from specctl.errors import ArtifactError
from specctl.registry import (
    Note,
    Package,
    Reader,
    Reference,
    parse_reference,
    promote,
    pull,
    pull_offline,
    push,
)
from specctl.registry.listing import candidates
from specctl.registry.pulling import MAX_NOTE_BYTES
from specctl.registry.resolving import CLOCK_SKEW_S
from specctl.registry.trust import Revocation, Trust
from specctl.registry.verifying import verify
from tests.artifacts.examples import PAIR
from tests.registry.worlds import (
    NAME,
    NEXT,
    PROD,
    HandClock,
    code_of,
    package,
    reader_in,
    registry_on,
    trusting,
    writer_on,
)
from tests.stores.memory import MemoryStore

Real = tuple[Package, Package]
KEY = SigningKey.generate()
RECORD, URL = trusting(KEY), MemoryStore.url


def test_a_reference_gives_its_present_version(
    published: MemoryStore, real: Real, tmp_path: Path
) -> None:
    reader = reader_in(tmp_path)
    pulled = pull(registry_on(published), PROD, reader, expect=PAIR)
    assert pulled.artifact.digest == real[1].digest
    assert {p.name: p.read_bytes() for p in pulled.folder.iterdir()} == dict(real[1].files)
    older = Reference(NAME, digest=real[0].digest)
    assert pull(registry_on(published), older, reader).artifact.digest == real[0].digest


@pytest.mark.parametrize(
    ("text", "code"),
    [(NAME, "E_NAME"), (f"{NAME}@next", "E_UNKNOWN_ALIAS"), ("other@prod", "E_UNKNOWN_NAME"),
     (f"{NAME}@sha256:{'0' * 64}", "E_MISSING")],
)  # fmt: skip
def test_a_reference_without_a_meaning_is_refused(
    published: MemoryStore, tmp_path: Path, text: str, code: str
) -> None:
    reference = parse_reference(text)
    assert code_of(pull, registry_on(published), reference, reader_in(tmp_path)) == code


def test_a_refused_artifact_is_not_in_the_cache(published: MemoryStore, tmp_path: Path) -> None:
    reader = reader_in(tmp_path)
    other = PAIR.model_copy(update={"target_digest": "sha256:" + "e" * 64})
    assert code_of(pull, registry_on(published), PROD, reader, expect=other) == "E_TARGET"
    for key in [key for key in published.kept if key.startswith("blobs/")]:
        published.kept[key] = published.kept[key][:-1] + b"?"
    assert code_of(pull, registry_on(published), PROD, reader) == "E_DIGEST"
    assert not any(reader.cache.root.rglob("config.json"))


def test_an_expired_entry_is_refused_whatever_came_after_it(
    published: MemoryStore, real: Real, tmp_path: Path
) -> None:
    """Family 17, frozen: the entry that the answer rests on counts, and no other."""
    clock = HandClock()
    until = Note(expires=clock.after(1)())
    promote(writer_on(published, clock), NAME, "next", real[0].digest, note=until)
    push(writer_on(published, clock), package("nightly"), NAME, note=until)
    pull(registry_on(published, clock), NEXT, reader_in(tmp_path))
    clock.now_s += 1
    assert code_of(pull, registry_on(published, clock), NEXT, reader_in(tmp_path)) == "E_STALE"
    push(writer_on(published, clock), package("newer"), NAME)
    assert code_of(pull, registry_on(published, clock), NEXT, reader_in(tmp_path)) == "E_STALE"
    nightly = Reference(NAME, digest=package("nightly").digest)
    assert code_of(pull, registry_on(published, clock), nightly, reader_in(tmp_path)) == "E_STALE"
    assert pull(registry_on(published, clock), PROD, reader_in(tmp_path)).artifact


def test_an_expired_version_is_not_pointed_to(published: MemoryStore, real: Real) -> None:
    clock = HandClock()
    push(writer_on(published, clock), real[0], NAME, note=Note(expires=clock.after(1)()))
    clock.now_s += 2
    writer = writer_on(published, clock)
    assert code_of(promote, writer, NAME, "next", real[0].digest) == "E_STALE"


def test_a_name_that_requires_signatures_has_them_or_is_refused(
    published: MemoryStore, real: Real, tmp_path: Path
) -> None:
    """Unsigned; signed by an unknown key; the version signed but not the move; all of it."""

    def attempt(*roles: str) -> str:
        reader = reader_in(tmp_path, trusting(KEY, *roles))
        return code_of(pull, registry_on(published), PROD, reader)

    assert attempt() == "E_SIG"
    for author in (SigningKey.generate(), KEY):
        push(writer_on(published, None, author), real[0], NAME)
        assert attempt() == "E_SIG"
        promote(writer_on(published), NAME, "prod", real[0].digest)
        assert attempt() == "E_SIG"
    promote(writer_on(published, None, KEY), NAME, "prod", real[0].digest)
    pulled = pull(registry_on(published), PROD, reader_in(tmp_path, RECORD))
    assert pulled.artifact.digest == real[0].digest
    assert attempt("publisher") == "E_SIG"


def signatures(store: MemoryStore) -> list[str]:
    return [key for key in store.kept if key.startswith("signatures/")]


@pytest.mark.parametrize("lost", ["entry", "artifact"])
def test_a_version_that_readers_would_refuse_is_not_promoted(
    published: MemoryStore, real: Real, tmp_path: Path, lost: str
) -> None:
    """A signed history is no signature of the artifact, and the other way round."""
    writer = writer_on(published, None, KEY)
    promoter = writer_on(published, None, KEY, trust=RECORD)
    push(writer, real[0], NAME)
    promote(writer, NAME, "prod", real[0].digest)
    assert pull(registry_on(published), PROD, reader_in(tmp_path / "before", RECORD))
    if lost == "entry":
        push(writer_on(published), real[0], NAME)  # its newest publication is unsigned
    else:
        for key in signatures(published):
            published.delete(key)
    before = len(registry_on(published).log(NAME).entries)
    assert code_of(promote, promoter, NAME, "next", real[0].digest) == "E_SIG"
    reader = reader_in(tmp_path / "after", RECORD)
    assert code_of(pull, registry_on(published), PROD, reader) == "E_SIG"
    assert len(registry_on(published).log(NAME).entries) == before
    push(writer, real[0], NAME)
    assert promote(promoter, NAME, "next", real[0].digest)


def test_a_signature_counts_for_its_own_name_and_place(
    published: MemoryStore, real: Real, tmp_path: Path
) -> None:
    """Family 15: a signed entry copied to another registry, a signed artifact to another name."""
    push(writer_on(published, None, KEY), real[0], "qwen3-other")
    push(writer_on(published), real[0], NAME)
    promote(writer_on(published, None, KEY), NAME, "prod", real[0].digest)
    assert code_of(pull, registry_on(published), PROD, reader_in(tmp_path, RECORD)) == "E_SIG"
    other = MemoryStore()
    registry_on(other)
    other.kept = {**published.kept, "registry.json": other.kept["registry.json"]}
    assert code_of(pull, registry_on(other), PROD, reader_in(tmp_path, RECORD)) == "E_LOG"


def test_a_writer_is_refused_before_readers_are(published: MemoryStore, real: Real) -> None:
    trust = trusting(KEY, "publisher")
    before = dict(published.kept)
    assert code_of(push, writer_on(published, trust=trust), real[0], NAME) == "E_SIG"
    assert published.kept == before, "nothing was stored either"
    push(writer_on(published, None, KEY, trust=trust), real[0], NAME)
    num_entries = len(registry_on(published).log(NAME).entries)
    promoter = writer_on(published, None, KEY, trust=trust)
    assert code_of(promote, promoter, NAME, "prod", real[0].digest) == "E_SIG"
    assert len(registry_on(published).log(NAME).entries) == num_entries


THEN, UNTIL = HandClock(1_580_515_200.0), "2020-06-01T00:00:00Z"
"""February 2020, while the old key was good, and the end of that key."""


@pytest.fixture
def chain(real: Real) -> Package:
    return real[0]


@pytest.fixture
def signed(chain: Package) -> MemoryStore:
    """A version signed by `KEY`, and `prod` at it; the same bytes unsigned as `scratch`."""
    store = MemoryStore()
    push(writer_on(store, None, KEY), chain, NAME)
    promote(writer_on(store, None, KEY), NAME, "prod", chain.digest)
    push(writer_on(store), chain, "scratch")
    return store


def test_an_expired_key_does_not_sign_on(signed: MemoryStore, real: Real, tmp_path: Path) -> None:
    old, digest = SigningKey.generate(), real[0].digest
    reader = reader_in(tmp_path, trusting(old, until=UNTIL, also=RECORD))
    stolen = Package(digest, real[0].files, (sign_artifact(old, digest, NAME, created=THEN()),))
    thief, pinned = writer_on(signed, THEN, old), PROD.pinned(digest)
    push(thief, stolen, NAME)
    assert code_of(pull, registry_on(signed), pinned, reader) == "E_SIG"
    promote(thief, NAME, "prod", digest)  # of two in a row the second follows the first
    push(writer_on(signed, None, KEY), real[0], NAME)  # the version is sound again, not the move
    assert code_of(pull, registry_on(signed), PROD, reader) == "E_SIG"
    first = MemoryStore()  # where nobody else signed before, it cannot be known
    push(writer_on(first, THEN, old), stolen, NAME)
    assert pull(registry_on(first), pinned, reader)


def test_all_give_the_verdict_of_a_pull(signed: MemoryStore, real: Real, tmp_path: Path) -> None:
    old, registry = SigningKey.generate(), registry_on(signed)
    record = trusting(old, until=UNTIL, also=RECORD)
    trust, reader = record, reader_in(tmp_path, record)
    promote(writer_on(signed, THEN, old), NAME, "next", real[0].digest)
    assert code_of(pull, registry, NEXT, reader) == "E_SIG"
    assert [one.code for one in verify(registry, trust, NEXT).findings] == ["E_SIG"]
    assert [one.place for one in verify(registry, trust).findings] == [f"{NAME}@next, generation 2"]
    refusals = {one.reference: one.refusal for one in candidates(registry, trust, pytest.fail)}
    assert refusals.pop(str(PROD)) is None, "its own entries are sound"
    assert "E_SIG" in str(refusals.pop(str(NEXT)))
    good = writer_on(signed, None, KEY, trust=trust)
    push(writer_on(signed, THEN, old), real[0], NAME)
    assert code_of(promote, good, NAME, "other", real[0].digest) == "E_SIG"
    push(good, real[0], NAME)
    assert promote(good, NAME, "next", real[0].digest).changed, "a refused move is renewed"
    assert verify(registry, trust).findings == []
    assert pull(registry, NEXT, reader)


@pytest.mark.parametrize("late_s", [0, CLOCK_SKEW_S, CLOCK_SKEW_S + 1])
def test_an_hour_behind_a_keys_end_is_the_clock(real: Real, tmp_path: Path, late_s: int) -> None:
    """Signed in time, behind an entry that another signer dated so long after the key's end."""
    end, old, store = HandClock(), SigningKey.generate(), MemoryStore()
    reader = reader_in(tmp_path, trusting(old, until=end(), also=RECORD))
    push(writer_on(store, end.after(late_s), KEY), real[0], NAME)
    promote(writer_on(store, end, old), NAME, "prod", real[0].digest)
    now = registry_on(store, end.after(1e6))
    if late_s <= CLOCK_SKEW_S:
        assert pull(now, PROD, reader)
    else:
        with pytest.raises(ArtifactError, match=f"expired {end()}.*behind entries of") as late:
            pull(now, PROD, reader)
        assert late.value.code == "E_SIG"


@pytest.mark.parametrize("ahead_h", [3, 24 * 365])
def test_one_push_from_a_clock_that_is_ahead_stops_nobody(
    signed: MemoryStore, real: Real, tmp_path: Path, ahead_h: float
) -> None:
    start = HandClock()
    push(writer_on(signed, start.after(ahead_h * 3600), KEY), real[0], NAME)
    promote(writer_on(signed, start.after(60), KEY), NAME, "next", real[0].digest)
    for later_h in (0.0, 1.0, 2.0, ahead_h, 24.0 * 800):
        now = start.after(60 + later_h * 3600)
        assert pull(registry_on(signed, now), NEXT, reader_in(tmp_path, RECORD))


def test_unsigned_entries_and_those_of_the_future_end_no_key_sooner(
    signed: MemoryStore, real: Real, tmp_path: Path
) -> None:
    end, old = HandClock().after(1e5), SigningKey.generate()
    push(writer_on(signed, end.after(1e8), KEY), real[0], NAME)
    push(writer_on(signed, end.after(1e5), actor="eve"), package("evil"), NAME)
    promote(writer_on(signed, end, old), NAME, "next", real[0].digest)
    push(writer_on(signed, end.after(1), KEY), real[0], NAME)
    record = trusting(old, until=end(), also=RECORD)
    assert pull(registry_on(signed, end.after(2e5)), NEXT, reader_in(tmp_path, record))


def test_dates_in_unsigned_registries_do_not_matter(real: Real, tmp_path: Path) -> None:
    store = MemoryStore()
    push(writer_on(store), real[0], NAME)
    push(writer_on(store, HandClock(1e9)), real[0], NAME)
    assert pull(registry_on(store), PROD.pinned(real[0].digest), reader_in(tmp_path))


# ------------------------------------------------------------------ offline


@pytest.fixture
def reader(signed: MemoryStore, tmp_path: Path) -> Reader:
    """A user without a trust file who pulled `prod`."""
    reader = reader_in(tmp_path)
    pull(registry_on(signed), PROD, reader)
    return reader


def test_the_cache_is_checked_again(signed: MemoryStore, chain: Package, tmp_path: Path) -> None:
    reader, clock = reader_in(tmp_path), HandClock()
    registry = registry_on(signed, clock)
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
    signed: MemoryStore, chain: Package, tmp_path: Path
) -> None:
    reader = reader_in(tmp_path, RECORD)
    scratch, own = (Reference(name, digest=chain.digest) for name in ("scratch", NAME))
    pull(registry_on(signed), scratch, reader)
    assert pull_offline(URL, scratch, reader).artifact.digest == chain.digest
    assert code_of(pull_offline, URL, own, reader) == "E_OFFLINE"
    assert code_of(pull_offline, "s3://never/asked", scratch, reader) == "E_OFFLINE"
    for url, reference in ((URL, own), ("elsewhere", own)):
        place = reader.cache._note(url, reference)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(reader.cache._note(URL, scratch).read_bytes())
        assert code_of(pull_offline, url, reference, reader) == "E_OFFLINE", "a moved note"
    pull(registry_on(signed), PROD, reader)
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


def test_the_trust_file_of_today_counts(signed: MemoryStore, tmp_path: Path) -> None:
    """Pulled with signatures; then the key is revoked, or another one is trusted instead."""
    pull(registry_on(signed), PROD, reader_in(tmp_path, RECORD))
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


def test_an_expired_entry_is_refused(signed: MemoryStore, chain: Package, tmp_path: Path) -> None:
    clock, reader = HandClock(), reader_in(tmp_path)
    until = Note(expires=clock.after(10)())
    promote(writer_on(signed, clock), NAME, "prod", chain.digest, note=until)
    pull(registry_on(signed, clock), PROD, reader)
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


def test_the_cache_is_closed_to_others(signed: MemoryStore, tmp_path: Path) -> None:
    reader = reader_in(tmp_path)
    reader.cache.root.mkdir(mode=0o755)
    pull(registry_on(signed), PROD, reader)
    folders = [path for path in reader.cache.root.rglob("*") if path.is_dir()]
    assert len(folders) > 5
    assert {path.stat().st_mode & 0o777 for path in (reader.cache.root, *folders)} == {0o700}
