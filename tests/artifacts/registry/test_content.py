"""Bytes are what their digests say, within the caps, or they are refused; nothing is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl.artifacts.manifest import CARD, MANIFEST, TENSORS, digest_of
from specctl.artifacts.registry import StoreContent, split_reference
from specctl.artifacts.registry.layout import blob_key, manifest_key
from specctl.errors import ArtifactError, StoreError
from specctl.policy.parse import canonical_json
from specctl.stores import open_store
from tests.artifacts.registry.worlds import MemoryStore, package, registry_on

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


def test_a_reference_behind_a_place_is_told_from_other_text(tmp_path: Path) -> None:
    registry_on(open_store(tmp_path))
    name = "qwen+eagle3@h200:chat"
    for place in (str(tmp_path), "s3://bucket/registry", "file:///srv/registry"):
        found = split_reference(f"{place}/{name}@prod")
        assert found is not None
        assert (found[0], str(found[1])) == (place, f"{name}@prod")
    found = split_reference(f"oci://host/repo/{name}@prod?log=s3://bucket/log")
    assert found is not None
    assert found[0] == "oci://host/repo?log=s3://bucket/log"
    for text in ("eagle2:depth=8", "a/b@prod", f"{tmp_path}/Upper@prod", os.devnull):
        assert split_reference(text) is None
