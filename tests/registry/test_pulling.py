"""A pull: what a reference means now, signed where the trust file asks for it.

Offline: what was pulled under this name from this registry, by today's trust file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl.artifacts.signing import SigningKey
from specctl.errors import ArtifactError
from specctl.registry import (
    Package,
    Reader,
    Reference,
    parse_reference,
    promote,
    pull,
    pull_offline,
    push,
)
from specctl.registry.listing import search
from specctl.registry.trust import Revocation, Trust
from specctl.registry.verifying import verify
from tests.artifacts.examples import PAIR
from tests.registry.worlds import (
    NAME,
    NEXT,
    PROD,
    code_of,
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


def test_a_name_that_requires_signatures_has_them_or_is_refused(
    published: MemoryStore, real: Real, tmp_path: Path
) -> None:
    """Unsigned; signed by an unknown key; the version signed but not the move; all of it."""

    def attempt() -> str:
        return code_of(pull, registry_on(published), PROD, reader_in(tmp_path, RECORD))

    assert attempt() == "E_SIG"
    for author in (SigningKey.generate(), KEY):
        push(writer_on(published, author), real[0], NAME)
        assert attempt() == "E_SIG"
        promote(writer_on(published), NAME, "prod", real[0].digest)
        assert attempt() == "E_SIG"
    promote(writer_on(published, KEY), NAME, "prod", real[0].digest)
    pulled = pull(registry_on(published), PROD, reader_in(tmp_path, RECORD))
    assert pulled.artifact.digest == real[0].digest


def test_a_version_that_readers_would_refuse_is_not_promoted(
    published: MemoryStore, real: Real, tmp_path: Path
) -> None:
    """A signed history is no signature of the artifact."""
    writer = writer_on(published, KEY)
    strict = writer_on(published, KEY, trust=RECORD)
    push(writer, real[0], NAME)
    promote(writer, NAME, "prod", real[0].digest)
    assert pull(registry_on(published), PROD, reader_in(tmp_path / "before", RECORD))
    for key in [key for key in published.kept if key.startswith("signatures/")]:
        published.delete(key)
    before = len(registry_on(published).log(NAME).entries)
    assert code_of(promote, strict, NAME, "next", real[0].digest) == "E_SIG"
    reader, pinned = reader_in(tmp_path / "after", RECORD), Reference(NAME, digest=real[0].digest)
    assert code_of(pull, registry_on(published), pinned, reader) == "E_SIG"
    assert len(registry_on(published).log(NAME).entries) == before
    push(writer, real[0], NAME)
    assert promote(strict, NAME, "next", real[0].digest)


def test_a_signature_counts_for_its_own_name_and_place(
    published: MemoryStore, real: Real, tmp_path: Path
) -> None:
    """Family 15: a signed entry copied to another registry, a signed artifact to another name."""
    push(writer_on(published, KEY), real[0], "qwen3-other")
    push(writer_on(published), real[0], NAME)
    promote(writer_on(published, KEY), NAME, "prod", real[0].digest)
    assert code_of(pull, registry_on(published), PROD, reader_in(tmp_path, RECORD)) == "E_SIG"
    other = MemoryStore()
    registry_on(other)
    other.kept = {**published.kept, "registry.json": other.kept["registry.json"]}
    assert code_of(pull, registry_on(other), PROD, reader_in(tmp_path, RECORD)) == "E_LOG"


def test_a_writer_is_refused_before_readers_are(published: MemoryStore, real: Real) -> None:
    before = dict(published.kept)
    for key in (None, SigningKey.generate()):
        writer = writer_on(published, key, trust=RECORD)
        assert code_of(push, writer, real[0], NAME) == "E_SIG"
        assert published.kept == before, "nothing was stored either"
    push(writer_on(published, KEY, trust=RECORD), real[0], NAME)
    num_entries = len(registry_on(published).log(NAME).entries)
    unsigned = writer_on(published, trust=RECORD)
    assert code_of(promote, unsigned, NAME, "prod", real[0].digest) == "E_SIG"
    assert len(registry_on(published).log(NAME).entries) == num_entries


@pytest.fixture
def chain(real: Real) -> Package:
    return real[0]


@pytest.fixture
def signed(chain: Package) -> MemoryStore:
    """A version signed by `KEY`, and `prod` at it; the same bytes unsigned as `scratch`."""
    store = MemoryStore()
    push(writer_on(store, KEY), chain, NAME)
    promote(writer_on(store, KEY), NAME, "prod", chain.digest)
    push(writer_on(store), chain, "scratch")
    return store


def test_all_give_the_verdict_of_a_pull(signed: MemoryStore, real: Real, tmp_path: Path) -> None:
    registry, reader = registry_on(signed), reader_in(tmp_path, RECORD)
    promote(writer_on(signed), NAME, "next", real[0].digest)
    assert code_of(pull, registry, NEXT, reader) == "E_SIG"
    assert [one.code for one in verify(registry, RECORD, NEXT).findings] == ["E_SIG"]
    assert [one.place for one in verify(registry, RECORD).findings] == [
        f"{NAME}@next, generation 2"
    ]
    found = search(registry, RECORD, [NAME])
    refusals = {row["reference"]: row["refusal"] for row in found}
    assert refusals.pop(str(PROD)) is None, "its own entries are sound"
    assert "E_SIG" in str(refusals.pop(str(NEXT)))
    good = writer_on(signed, KEY, trust=RECORD)
    assert promote(good, NAME, "next", real[0].digest).changed, "a refused move is signed"
    assert verify(registry, RECORD).findings == []
    assert pull(registry, NEXT, reader)


# ------------------------------------------------------------------ offline


@pytest.fixture
def reader(signed: MemoryStore, tmp_path: Path) -> Reader:
    """A user without a trust file who pulled `prod`."""
    reader = reader_in(tmp_path)
    pull(registry_on(signed), PROD, reader)
    return reader


def test_the_cache_is_checked_again(signed: MemoryStore, chain: Package, tmp_path: Path) -> None:
    reader, registry = reader_in(tmp_path), registry_on(signed)
    assert code_of(pull_offline, URL, PROD, reader) == "E_OFFLINE"
    assert pull(registry, PROD, reader).remembered is None
    pulled = pull_offline(URL, PROD, reader, expect=PAIR)
    assert pulled.artifact.digest == chain.digest
    assert pulled.remembered is not None
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


def test_the_trust_file_of_today_counts(signed: MemoryStore, real: Real, tmp_path: Path) -> None:
    """Pulled with signatures; then the key is revoked, or another one is trusted instead. Unsigned
    entries on top do not hide the revocation."""
    pull(registry_on(signed), PROD, reader_in(tmp_path, RECORD))
    assert pull_offline(URL, PROD, reader_in(tmp_path, RECORD))
    stolen = Revocation(at="2026-01-01T00:00:00Z", reason="stolen")
    revoked = RECORD.keys[0].model_copy(update={"revoked": stolen})
    others: list[Trust] = [
        RECORD.model_copy(update={"keys": (revoked,)}),
        trusting(SigningKey.generate()),
    ]
    for record in others:
        assert code_of(pull_offline, URL, PROD, reader_in(tmp_path, record)) == "E_SIG"
    push(writer_on(signed), real[0], NAME)
    promote(writer_on(signed), NAME, "prod", real[0].digest)
    with pytest.raises(ArtifactError, match=r"was revoked .* \(stolen\)"):
        pull(registry_on(signed), PROD, reader_in(tmp_path, others[0]))


def test_a_note_of_another_owner_or_without_the_signatures_of_today_is_not_read(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How such a file is read is a law of histories too: `test_again`."""
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
