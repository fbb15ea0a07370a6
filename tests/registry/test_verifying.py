"""Verification finds every kind of damage and changes nothing; one fault hides no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.manifest import TENSORS, digest_of
from specctl.errors import ArtifactError, RegistryError, StoreError
from specctl.registry import Package, Reference, init_registry, promote, push, verify
from specctl.registry.content import blob_key, manifest_key, signature_folder
from specctl.registry.listing import name_rows, search
from specctl.registry.log import entry_key
from specctl.registry.trust import Trust
from specctl.registry.verifying import Finding
from specctl.stores import LocalStore, TransientError
from tests.artifacts.examples import PAIR
from tests.registry.worlds import (
    NAME,
    PROD,
    Ignoring,
    package,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore, Wrapped

ONE, TWO = package("one"), package("two")
BLOB = blob_key(digest_of(ONE.files[TENSORS]))
PINNED = Reference(NAME, digest=ONE.digest)


@pytest.fixture
def store() -> MemoryStore:
    """Two versions, the second one aliased."""
    store = MemoryStore()
    writer = writer_on(store)
    for one in (ONE, TWO):
        push(writer, one, NAME)
    promote(writer, NAME, "prod", TWO.digest)
    return store


def findings(store: MemoryStore, trust: Trust | None = None) -> list[Finding]:
    """Nothing is ever written."""
    before = dict(store.kept)
    found = verify(registry_on(store), trust or Trust()).findings
    assert store.kept == before
    return found


def flip(store: MemoryStore, key: str) -> None:
    data = store.kept[key]
    store.kept[key] = bytes([data[0] ^ 1]) + data[1:]


def add(store: MemoryStore, key: str, data: bytes = b"junk") -> None:
    store.kept[key] = data


JUNK = f"{signature_folder(ONE.digest)}/{digest_of(b'junk')[7:]}.json"
MANIFEST_KEY = manifest_key(TWO.digest)
DAMAGE: dict[str, tuple[Callable[[MemoryStore], object], str, str]] = {
    "blob flipped": (lambda store: flip(store, BLOB), "E_DIGEST", BLOB),
    "blob gone": (lambda store: store.delete(BLOB), "E_MISSING", BLOB),
    "blob longer": (lambda store: add(store, BLOB, b"longer than it was"), "E_SIZE", BLOB),
    "manifest flipped": (lambda store: flip(store, MANIFEST_KEY), "E_DIGEST", MANIFEST_KEY),
    "manifest gone": (lambda store: store.delete(MANIFEST_KEY), "E_MISSING", MANIFEST_KEY),
    "entry flipped": (lambda store: flip(store, entry_key(NAME, 1)), "E_LOG", entry_key(NAME, 1)),
    "entry gone": (lambda store: store.delete(entry_key(NAME, 0)), "E_LOG", entry_key(NAME, 0)),
    "a log of no name": (lambda s: add(s, "log/A/000000000000.json"), "E_NAME", "log/A"),
    "junk signature": (lambda store: add(store, JUNK), "E_SIG", JUNK),
    "signature of another digest": (lambda s: add(s, JUNK, b"other"), "E_DIGEST", JUNK),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_found_and_hides_no_other(store: MemoryStore, kind: str) -> None:
    harm, code, place = DAMAGE[kind]
    push(writer_on(store), package("zeta"), "zeta")
    harm(store)
    assert any(one.code == code and place in one.place + one.found for one in findings(store))
    store.delete(blob_key(digest_of(package("zeta").files[TENSORS])))
    places = {one.place for one in findings(store) if one.code == "E_MISSING"}
    assert f"zeta@{package('zeta').digest}" in places
    with pytest.raises(ArtifactError) as refused:
        verify(registry_on(store), Trust()).refuse("registry")
    assert refused.value.code == findings(store)[0].code


def test_one_reference_is_verified_alone(store: MemoryStore) -> None:
    flip(store, BLOB)
    registry = registry_on(store)
    assert verify(registry, Trust(), PROD).findings == []
    assert [one.code for one in verify(registry, Trust(), PINNED).findings] == ["E_DIGEST"]
    with pytest.raises(RegistryError, match="E_UNKNOWN_ALIAS"):
        verify(registry, Trust(), Reference(NAME, "next"))


@pytest.mark.parametrize("prefix", ["blobs/", "manifests/", "signatures", "log/"])
def test_an_outage_ends_the_check_and_is_no_damage(
    store: MemoryStore, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = TransientError("store: expected an answer, found none", hint="try again")

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(key: str, **options: int) -> object:
            if key.startswith(prefix):
                raise outage
            return real(key, **options)

        return call

    registry = registry_on(store)
    for method in ("get", "objects"):
        monkeypatch.setattr(store, method, failing(getattr(store, method)))
    with pytest.raises(StoreError) as raised:
        verify(registry, Trust())
    assert raised.value is outage
    if prefix == "log/":
        for read in (
            lambda found: name_rows(found, Trust()),
            lambda found: list(search(found, Trust(), [])),
        ):
            with pytest.raises(StoreError):
                read(registry_on(store))


@pytest.fixture
def folder(tmp_path: Path, real: tuple[Package, Package]) -> Path:
    """`prod` of the name, and another name, in a folder."""
    writer = writer_on(LocalStore(tmp_path / "registry"))
    push(writer, real[0], NAME)
    promote(writer, NAME, "prod", real[0].digest)
    push(writer, real[1], "other")
    return tmp_path / "registry"


def test_a_store_that_came_to_ignore_the_condition_takes_no_push(folder: Path) -> None:
    writer = writer_on(Ignoring(LocalStore(folder)))
    with pytest.raises(StoreError, match="If-None-Match"):
        push(writer, package("more"), "more")
    assert set(writer.registry.names()) == {NAME, "other"}


def test_a_registry_that_lost_its_marker_is_named_as_that(folder: Path) -> None:
    """The advice for an absent one, `init`, would lead nowhere."""
    (folder / "registry.json").unlink()
    with pytest.raises(RegistryError, match=r"E_EXISTS.*lost its registry.json.*from a copy"):
        init_registry(folder)


@pytest.mark.parametrize("part", ["blobs", "manifests", "log", "signatures"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["object", "folder"])
def test_a_link_is_a_finding(folder: Path, tmp_path: Path, part: str, *, is_whole: bool) -> None:
    (folder / part).mkdir(exist_ok=True)
    place = folder / part
    if not is_whole and part != "signatures":
        place = next(path for path in sorted(place.rglob("*")) if path.is_file())
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    found = verify(registry_on(LocalStore(folder)), Trust()).findings
    assert any(one.code == "E_STORE" and "link" in one.found for one in found)


@pytest.mark.parametrize("harm", ["a link", "not JSON", "version 9"])
def test_a_name_that_cannot_be_read_hides_no_other(
    folder: Path,
    harm: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    real: tuple[Package, Package],
) -> None:
    """In a list, in a search and in a verification."""
    entry = folder / "log" / "other" / "000000000000.json"
    where = "log/other"
    if harm == "version 9":
        where = manifest_key(real[1].digest)
        text = (folder / where).read_bytes().replace(b'_version":', b'_version":9')
        (folder / where).write_bytes(text)
    elif harm == "a link":
        entry.unlink()
        entry.symlink_to("/etc/hostname")
    else:
        entry.write_bytes(b"not JSON")
    registry = registry_on(LocalStore(folder))
    names = {row["name"]: row for row in name_rows(registry, Trust())}
    assert names[NAME]["num_versions"] == 1
    assert "manifest" in where or where in names["other"]["error"]
    rows = list(search(registry, Trust(), []))
    assert [row["reference"] for row in rows] == [str(PROD)]
    assert where in caplog.messages[0]
    found = [one.place + one.found for one in verify(registry, Trust()).findings]
    assert any(where in text or real[1].digest in text for text in found)


WORDS = {
    "qwen3-8b": 1,
    "other": 1,
    "h200 chat": 1,
    "toy nothing": 0,
    "prod": 1,
    PAIR.target_digest: 2,
    PAIR.drafter_digest[:20]: 2,
}


def test_a_search_is_for_parts_of_names_and_digests(
    folder: Path, real: tuple[Package, Package], caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_on(LocalStore(folder))
    push(writer_on(registry.store), package("unreadable"), "third")
    for words, num_rows in WORDS.items():
        caplog.clear()
        assert len(list(search(registry, Trust(), words.split()))) == num_rows, words
        assert len(caplog.messages) == 1, "of the version that cannot be read"
    for one in real:
        [row] = search(registry, Trust(), [one.digest])
        assert row["digest"] == one.digest


def test_a_listing_reads_many_histories_at_once() -> None:
    """A bucket that answers nobody before two have asked: one request at a time gets no answer."""

    class Together(Wrapped):
        two = threading.Barrier(2)

        def step(self, word: str, key: str, act: Callable[[], Any]) -> Any:
            if word == "get" and key.endswith("000000000000.json"):
                self.two.wait(timeout=60)
            return act()

    store = MemoryStore()
    for name in ("a+b", "c+d"):
        push(writer_on(store), package("one"), name)
    rows = name_rows(registry_on(Together(store)), Trust())
    assert [(row["name"], row["num_versions"]) for row in rows] == [("a+b", 1), ("c+d", 1)]
