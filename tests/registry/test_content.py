"""Bytes are what their digests say, within the caps, or they are refused; nothing is replaced."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from specctl.artifacts.manifest import CARD, MANIFEST, TENSORS, digest_of
from specctl.artifacts.signing import MAX_ENVELOPE_BYTES, envelope_bytes
from specctl.artifacts.signing.statement import STATEMENT_TYPE, statement_bytes
from specctl.errors import ArtifactError, StoreError, UsageError
from specctl.policy.parse import canonical_json
from specctl.registry import StoreContent, init_registry, open_registry, store_content
from specctl.registry.layout import blob_key, manifest_key, signature_folder
from specctl.stores import open_store
from specctl.stores.interface import TransientError
from tests.registry.worlds import Dying, Killed, package
from tests.stores.memory import MemoryStore

ONE, TWO = package("one"), package("two")


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    for one in (ONE, TWO):
        StoreContent(store).publish(one.digest, one.files, lambda _: None)
    return store


def refusal(store: MemoryStore, digest: str = ONE.digest) -> str:
    with pytest.raises(ArtifactError) as refused:
        StoreContent(store).fetch(digest, lambda _: None)
    return refused.value.code


def key_of(name: str) -> str:
    return blob_key(digest_of(ONE.files[name]))


def test_files_come_back_and_are_counted(store: MemoryStore) -> None:
    sizes: list[int] = []
    assert StoreContent(store).fetch(ONE.digest, sizes.append) == dict(ONE.files)
    assert sum(sizes) == ONE.size_bytes - len(ONE.files[MANIFEST])


def test_blobs_of_another_version_are_refused(store: MemoryStore) -> None:
    """Family 18, mix and match: same size, other content."""
    store.kept[key_of(TENSORS)] = TWO.files[TENSORS]
    assert refusal(store) == "E_DIGEST"
    store.kept[manifest_key(ONE.digest)] = TWO.files[MANIFEST]
    assert refusal(store) == "E_DIGEST"


def test_more_bytes_than_declared_are_not_read(store: MemoryStore) -> None:
    """Family 7: what is sent, not what is said, is capped."""
    store.kept[key_of(CARD)] = b"x" * (1 << 20)
    assert refusal(store) == "E_SIZE"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"../x": 1}, "E_PATH"),
        ({"con": 1}, "E_PATH"),
        ({"Readme.md": 1}, "E_NAME"),
        ({"evil.pkl": 1}, "E_EXTRA"),
        ({MANIFEST: 1}, "E_EXTRA"),
        ({"\ud800": 1}, "E_NAME"),
        ({CARD: 10**12}, "E_SIZE"),
        ({CARD: -1}, "E_SCHEMA"),
        ([], "E_SCHEMA"),
    ],
    ids=str,
)
def test_a_manifest_that_lists_what_it_must_not(
    store: MemoryStore, files: dict[str, int], code: str
) -> None:
    """Families 1, 2, 7, 10 and 11: refused by the list alone, nothing is fetched."""
    listed = (
        {name: {"digest": ONE.digest, "size_bytes": size} for name, size in files.items()}
        if isinstance(files, dict)
        else files
    )
    manifest = canonical_json({"files": listed}).encode()
    store.kept[manifest_key(digest_of(manifest))] = manifest
    assert refusal(store, digest_of(manifest)) == code


def test_publishing_again_is_harmless_and_never_replaces(store: MemoryStore) -> None:
    before = dict(store.kept)
    StoreContent(store).publish(ONE.digest, ONE.files, lambda _: None)
    assert store.kept == before
    store.kept[key_of(TENSORS)] = b"altered"
    with pytest.raises(StoreError, match="fsck"):
        StoreContent(store).publish(ONE.digest, ONE.files, lambda _: None)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({TENSORS: b"other"}, "E_DIGEST"),
        ({MANIFEST: TWO.files[MANIFEST]}, "E_DIGEST"),
        ({"extra": b""}, "E_EXTRA"),
        ({CARD: None}, "E_MISSING"),
    ],
    ids=str,
)
def test_only_the_files_of_the_manifest_are_published(
    change: dict[str, bytes | None], code: str
) -> None:
    files = {n: data for n, data in {**ONE.files, **change}.items() if data is not None}
    store = MemoryStore()
    with pytest.raises(ArtifactError) as refused:
        StoreContent(store).publish(ONE.digest, files, lambda _: None)
    assert (refused.value.code, store.kept) == (code, {})


@pytest.mark.parametrize(
    "url",
    ["oci://ann:hunter2@host/r?log=/x", "oci://host/r?log=s3://ann:hunter2@b", "s3://hunter2@b/x"],
)
def test_a_registry_s_url_holds_no_secret(url: str) -> None:
    for use in (init_registry, open_registry):
        with pytest.raises(UsageError, match="no user and no password") as refused:
            use(url)
        assert "hunter2" not in str(refused.value)


def test_a_removal_that_was_cut_off_is_done_again(store: MemoryStore) -> None:
    """What it left is `held`, so that the next collection finds it."""
    content = StoreContent(store)
    content.add_signature(ONE.digest, statement(ONE.digest, "name"))
    kept = dict(store.kept)
    for dies_at, is_after in product(range(9), (False, True)):
        store.kept = dict(kept)
        dying = StoreContent(Dying(store, dies_at, is_after))
        with suppress(Killed):
            dying.remove(ONE.digest)
        left = [key for key in store.kept if ONE.digest[7:] in key]
        assert not left or ONE.digest in content.held()
    assert not left


# ------------------------------------------------------------------ signatures among junk


def statement(digest: str, name: str) -> bytes:
    """An envelope that nobody signed."""
    payload = statement_bytes(digest, name, "2026-01-01T00:00:00Z", None)
    return envelope_bytes(STATEMENT_TYPE, payload)


def put_junk(folder: Path, good: str) -> None:
    """What may lie beside an envelope; everything sorts before it, or has its form."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (".nfs0001", " a b.json", "README.md", "0" * 64 + ".json"):
        (folder / name).write_bytes(b"x")
    (folder / f"{'1' * 64}.json").symlink_to("/etc/hostname")
    (folder / f"{'2' * 64}.json").mkdir()
    os.mkfifo(folder / f"{'3' * 64}.json")
    (folder / f"{'4' * 64}.json").write_bytes(b"x" * (MAX_ENVELOPE_BYTES + 1))
    num_junk = 0
    for number in range(10_000):
        junk = envelope_bytes("text/x", str(number).encode())
        name = f"{digest_of(junk)[7:]}.json"
        if name < good and num_junk < 100:
            (folder / name).write_bytes(junk)
            num_junk += 1
    assert num_junk == 100


def test_junk_hides_no_signature(tmp_path: Path) -> None:
    content = StoreContent(open_store(tmp_path))
    content.publish(ONE.digest, ONE.files, lambda _: None)
    envelopes = [statement(ONE.digest, f"name{number}") for number in range(20)]
    last = max(envelopes, key=digest_of)
    put_junk(tmp_path / signature_folder(ONE.digest), f"{digest_of(last)[7:]}.json")
    other = statement(TWO.digest, "name")
    for envelope in (*envelopes, other):
        content.add_signature(ONE.digest, envelope)
    assert sorted(content.signatures(ONE.digest)) == sorted(envelopes)
    unfit = dict(content.unfit_signatures())
    assert len(unfit) == 100 + 4 + 1
    keys = {place.rpartition("/")[2] for place in content.foreign()}
    assert keys == {".nfs0001", " a b.json", "README.md"}


@pytest.mark.parametrize(("cap", "value"), [("MAX_SIGNATURES", 3), ("MAX_SIGNATURE_BYTES", 1500)])
def test_what_is_read_in_search_of_signatures_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: str, value: int
) -> None:
    content = StoreContent(open_store(tmp_path))
    for number in range(9):
        content.add_signature(ONE.digest, statement(ONE.digest, f"name{number}"))
    assert len(content.signatures(ONE.digest)) == 9
    monkeypatch.setattr(store_content, cap, value)
    assert len(content.signatures(ONE.digest)) == 3


def test_a_store_that_cannot_be_reached_is_not_one_without_signatures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passing over what is unfit must not pass over an outage."""
    store = MemoryStore()
    StoreContent(store).add_signature(ONE.digest, statement(ONE.digest, "name"))

    def get(key: str, *, max_bytes: int) -> bytes:
        raise TransientError(key, expected="an answer", found="none", fix="retry")

    monkeypatch.setattr("specctl.stores.creating.FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(store, "get", get)
    with pytest.raises(TransientError):
        StoreContent(store).signatures(ONE.digest)
