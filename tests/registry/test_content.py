"""Bytes are what their digests say, within the caps, or they are refused; nothing is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl.artifacts import signing
from specctl.artifacts.manifest import CARD, MANIFEST, TENSORS, digest_of
from specctl.errors import ArtifactError
from specctl.records import canonical_json
from specctl.registry import content as room
from specctl.registry.content import Content, blob_key, manifest_key, signature_folder
from specctl.stores import open_store
from tests.registry.worlds import code_of, package
from tests.stores.memory import MemoryStore

ONE, TWO = package("one"), package("two")


def statement(digest: str, name: str) -> bytes:
    """An envelope that nobody signed."""
    payload = signing.statement_bytes(digest, name)
    return signing.envelope_bytes(signing.STATEMENT_TYPE, payload)


def put(content: Content, *envelopes: bytes) -> Content:
    content.publish(ONE.digest, ONE.files, envelopes)
    return content


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    for one in (ONE, TWO):
        Content(store).publish(one.digest, one.files)
    return store


def refusal(store: MemoryStore, digest: str = ONE.digest) -> str:
    return code_of(Content(store).fetch, digest)


def key_of(name: str) -> str:
    return blob_key(digest_of(ONE.files[name]))


@pytest.mark.parametrize(
    ("key", "data", "code"),
    [
        (key_of(TENSORS), TWO.files[TENSORS], "E_DIGEST"),  # same size, other content
        (manifest_key(ONE.digest), TWO.files[MANIFEST], "E_DIGEST"),
        (key_of(CARD), b"x" * (1 << 20), "E_SIZE"),  # more than declared
        (key_of(CARD), None, "E_MISSING"),
        (manifest_key(ONE.digest), None, "E_MISSING"),
    ],
    ids=str,
)
def test_other_bytes_than_the_digest_says_are_refused(
    store: MemoryStore, key: str, data: bytes | None, code: str
) -> None:
    """Families 7 and 18."""
    store.kept.pop(key) if data is None else store.kept.update({key: data})
    assert refusal(store) == code


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"../x": 1}, "E_PATH"),
        ({"Readme.md": 1}, "E_NAME"),
        ({"evil.pkl": 1}, "E_EXTRA"),
        ({MANIFEST: 1}, "E_EXTRA"),
        ({CARD: 10**12}, "E_SIZE"),
        ([], "E_SCHEMA"),
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused_by_its_list_alone(
    store: MemoryStore, files: dict[str, int], code: str
) -> None:
    """Families 1, 2, 7, 10 and 11: nothing is fetched."""
    listed = (
        {name: {"digest": ONE.digest, "size_bytes": size} for name, size in files.items()}
        if isinstance(files, dict)
        else files
    )
    manifest = canonical_json({"files": listed}).encode()
    store.kept[manifest_key(digest_of(manifest))] = manifest
    assert refusal(store, digest_of(manifest)) == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({TENSORS: b"other"}, "E_DIGEST"),
        ({MANIFEST: TWO.files[MANIFEST]}, "E_DIGEST"),
        ({MANIFEST: None}, "E_MISSING"),
        ({"extra": b""}, "E_EXTRA"),
        ({CARD: None}, "E_MISSING"),
    ],
    ids=str,
)
def test_only_files_of_a_manifest_are_published(change: dict[str, bytes | None], code: str) -> None:
    files = {n: data for n, data in {**ONE.files, **change}.items() if data is not None}
    store = MemoryStore()
    with pytest.raises(ArtifactError) as refused:
        Content(store).publish(ONE.digest, files, ())
    assert (refused.value.code, store.kept) == (code, {})


def put_junk(folder: Path, good: str) -> None:
    """Objects beside an envelope that sort before it, or have its form."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (".nfs0001", " a b.json", "README.md", "0" * 64 + ".json"):
        (folder / name).write_bytes(b"x")
    (folder / f"{'1' * 64}.json").symlink_to("/etc/hostname")
    (folder / f"{'2' * 64}.json").mkdir()
    os.mkfifo(folder / f"{'3' * 64}.json")
    (folder / f"{'4' * 64}.json").write_bytes(b"x" * (signing.MAX_ENVELOPE_BYTES + 1))
    junk = (signing.envelope_bytes("text/x", str(number).encode()) for number in range(1_000))
    named = ((f"{digest_of(one)[7:]}.json", one) for one in junk)
    first = [(name, one) for name, one in named if name < good][:10]
    assert len(first) == 10
    for name, one in first:
        (folder / name).write_bytes(one)


def test_junk_hides_no_signature(tmp_path: Path) -> None:
    content = Content(open_store(tmp_path))
    envelopes = [statement(ONE.digest, f"name{number}") for number in range(20)]
    last = max(envelopes, key=digest_of)
    put_junk(tmp_path / signature_folder(ONE.digest), f"{digest_of(last)[7:]}.json")
    put(content, *envelopes, statement(TWO.digest, "name"))
    assert sorted(content.signatures(ONE.digest)) == sorted(envelopes)
    damaged = dict(content.damaged_signatures(ONE.digest))
    assert len(damaged) == 10 + 3 + 1, "junk, a short one, a link, a pipe, another's statement"


def test_the_signatures_that_are_read_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    content = Content(MemoryStore())
    put(content, *(statement(ONE.digest, f"name{number}") for number in range(9)))
    assert len(content.signatures(ONE.digest)) == 9
    monkeypatch.setattr(room, "MAX_SIGNATURES", 3)
    assert len(content.signatures(ONE.digest)) == 3
