"""fsck finds every kind of damage, tells it from what only takes room, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specctl.artifacts.signing import SigningKey, Trust, sign_artifact
from specctl.errors import ArtifactError, RegistryError, StoreError
from specctl.registry import Author, StoreContent, pin, promote, push
from specctl.registry.entries import Note
from specctl.registry.fsck import fsck, verify
from specctl.registry.garbage import sweep
from specctl.registry.layout import (
    blob_key,
    log_key,
    manifest_key,
    signature_folder,
)
from specctl.registry.names import parse_reference
from specctl.registry.verdicts import refuse_damage
from specctl.stores.interface import StoredObject, TransientError
from specctl.stores.local import LocalStore
from tests.registry.pulls import trusting
from tests.registry.races import OLD, RETENTION_S, World
from tests.registry.worlds import (
    GRACE_S,
    NAME,
    HandClock,
    Wrapped,
    package,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore

ONE, TWO = package("one"), package("two")
BLOB = next(iter(ONE.parts - TWO.parts - {ONE.digest}))


@pytest.fixture
def store() -> MemoryStore:
    """Two versions, one aliased, one pinned."""
    store = MemoryStore()
    writer = writer_on(store)
    for one in (ONE, TWO):
        push(writer, one, NAME)
    promote(writer, NAME, "prod", TWO.digest)
    pin(writer, ONE.digest, reason="kept")
    return store


def codes(store: MemoryStore, trust: Trust | None = None) -> set[str]:
    """Codes of damage; nothing is ever written."""
    before = dict(store.kept)
    found = {one.code for one in fsck(registry_on(store), trust or Trust()) if one.is_damage}
    assert store.kept == before
    return found


def flip(store: MemoryStore, key: str) -> None:
    data = store.kept[key]
    store.kept[key] = bytes([data[0] ^ 1]) + data[1:]


def test_a_sound_registry_has_no_findings(store: MemoryStore) -> None:
    assert list(fsck(registry_on(store), Trust())) == []


DAMAGE: dict[str, tuple[Callable[[MemoryStore], object], str]] = {
    "blob flipped": (lambda store: flip(store, blob_key(BLOB)), "E_DIGEST"),
    "blob gone": (lambda store: store.delete(blob_key(BLOB)), "E_MISSING"),
    "manifest flipped": (lambda store: flip(store, manifest_key(TWO.digest)), "E_DIGEST"),
    "manifest gone": (lambda store: store.delete(manifest_key(TWO.digest)), "E_MISSING"),
    "entry flipped": (lambda store: flip(store, log_key(NAME, 1)), "E_LOG"),
    "entry gone": (lambda store: store.delete(log_key(NAME, 0)), "E_LOG"),
    "foreign blob": (lambda store: store.kept.update({"blobs/sha256/x": b""}), "E_EXTRA"),
    "foreign entry": (lambda store: store.kept.update({"log/a/head": b""}), "E_EXTRA"),
    "foreign name": (lambda store: store.kept.update({"log/A/000000000000.json": b""}), "E_NAME"),
    "foreign signature": (
        lambda store: store.kept.update({f"{signature_folder(ONE.digest)}/ a b.json": b""}),
        "E_EXTRA",
    ),
    "signature that is none": (
        lambda store: StoreContent(store).add_signature(ONE.digest, b"junk"),
        "E_SIG",
    ),
    "foreign folder of blobs": (
        lambda store: store.kept.update({"blobs/sha512/x": b""}),
        "E_EXTRA",
    ),
    "garbage log that is none": (
        lambda store: store.kept.update({"log/_gc/000000000000.json": b"junk"}),
        "E_LOG",
    ),
    "pin with a name of its own": (lambda store: store.kept.update({"pins/a b": b""}), "E_LOG"),
    "pin that is none": (lambda store: store.kept.update({"pins/a/b.json": b"{}"}), "E_LOG"),
    "settings that are none": (
        lambda store: store.kept.update({"log/_settings/000000000000.json": b"{}"}),
        "E_LOG",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_found(store: MemoryStore, kind: str) -> None:
    harm, code = DAMAGE[kind]
    harm(store)
    assert code in codes(store)


@pytest.mark.parametrize("kind", DAMAGE)
def test_no_damage_hides_another(store: MemoryStore, kind: str) -> None:
    """Whatever else is wrong, the lost blob of a version is told."""
    push(writer_on(store), package("zeta"), "zeta")
    DAMAGE[kind][0](store)
    blob = next(iter(package("zeta").parts - ONE.parts - TWO.parts - {package("zeta").digest}))
    store.delete(blob_key(blob))
    places = {one.place for one in fsck(registry_on(store), Trust()) if one.code == "E_MISSING"}
    assert f"zeta@{package('zeta').digest}" in places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = writer_on(LocalStore(tmp_path / "registry"))
    push(writer, ONE, NAME)
    return tmp_path / "registry"


@pytest.mark.parametrize("key", [manifest_key(ONE.digest), blob_key(BLOB), log_key(NAME, 0)])
def test_an_object_that_is_a_link_is_a_finding(folder: Path, key: str) -> None:
    push(writer_on(LocalStore(folder)), TWO, "zeta")
    (folder / key).unlink()
    (folder / key).symlink_to("/etc/hostname")
    found = list(fsck(registry_on(LocalStore(folder)), Trust()))
    assert "E_STORE" in {one.code for one in found if one.is_damage}
    assert any("link" in one.found for one in found)


@pytest.mark.parametrize("name", ["blobs", "log", "pins", "signatures"])
def test_a_folder_that_is_a_link_is_a_finding(folder: Path, name: str, tmp_path: Path) -> None:
    if (folder / name).exists():
        (folder / name).rename(tmp_path / name)
    (tmp_path / name).mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path / name)
    assert "E_STORE" in {one.code for one in fsck(registry_on(LocalStore(folder)), Trust())}


def test_what_is_not_of_the_layout_is_found_in_the_root(folder: Path) -> None:
    assert list(fsck(registry_on(LocalStore(folder)), Trust())) == []
    (folder / "backup").mkdir()
    (folder / "notes.txt").touch()
    (folder / "away").symlink_to("/")
    found = list(fsck(registry_on(LocalStore(folder)), Trust()))
    assert {(one.code, one.place) for one in found} == {
        ("E_EXTRA", name) for name in ("backup", "notes.txt", "away")
    }


def test_a_missing_signature_is_damage_where_one_is_required(store: MemoryStore) -> None:
    key = SigningKey.generate()
    assert codes(store, Trust(trusting(key, "publisher"))) == {"E_SIG"}


def test_a_signature_under_another_digest_is_damage(store: MemoryStore) -> None:
    key = SigningKey.generate()
    registry = registry_on(store)
    registry.content.add_signature(ONE.digest, sign_artifact(key, ONE.digest, NAME))
    [stored] = [name for name in store.kept if name.startswith("signatures/")]
    flip(store, stored)
    assert "E_DIGEST" in codes(store, Trust(trusting(key, "publisher")))


def test_an_orphan_is_no_damage(store: MemoryStore) -> None:
    orphan = package("orphan")
    registry = registry_on(store)
    registry.content.publish(orphan.digest, orphan.files, lambda _: None)
    found = list(fsck(registry, Trust()))
    assert {(one.code, one.is_damage) for one in found} == {("W_ORPHAN", False)}
    assert {one.place for one in found} == orphan.parts - ONE.parts - TWO.parts


def test_the_entry_that_cannot_be_read_is_named_and_what_it_may_name_is_no_garbage(
    store: MemoryStore,
) -> None:
    """Its name's content looks like orphans then: nobody is to be told that no log names it."""
    flip(store, log_key(NAME, 1))
    found = list(fsck(registry_on(store), Trust()))
    [entry] = [one for one in found if one.code == "E_LOG"]
    assert entry.place.endswith(log_key(NAME, 1))
    orphans = {one.found for one in found if one.code == "W_ORPHAN"}
    assert orphans == {"no log that can be read names it"}
    with pytest.raises(ArtifactError, match="delete no entry"):
        refuse_damage(found, "the registry")


@pytest.mark.parametrize("key", [manifest_key(ONE.digest), blob_key(BLOB)])
def test_the_object_that_is_missing_is_named(store: MemoryStore, key: str) -> None:
    store.delete(key)
    reference = parse_reference(f"{NAME}@{ONE.digest}")
    for found in (
        fsck(registry_on(store), Trust()),
        verify(registry_on(store), reference, Trust()),
    ):
        assert any(one.code == "E_MISSING" and one.found.endswith(key) for one in found)


def test_verify_looks_at_one_reference(store: MemoryStore) -> None:
    flip(store, blob_key(BLOB))
    registry = registry_on(store)
    assert list(verify(registry, parse_reference(f"{NAME}@prod"), Trust())) == []
    found = list(verify(registry, parse_reference(f"{NAME}@{ONE.digest}"), Trust()))
    assert [one.code for one in found] == ["E_DIGEST"]
    with pytest.raises(RegistryError, match="E_UNKNOWN_ALIAS"):
        list(verify(registry, parse_reference(f"{NAME}@next"), Trust()))


OUTAGES: dict[str, StoreError] = {
    "no answer": TransientError("store", expected="an answer", found="none", fix="try again"),
    "refused": StoreError("store", expected="a role", found="Access Denied", fix="check it"),
}


@pytest.mark.parametrize("prefix", ["blobs/", "manifests/", "signatures/", "log/_gc", "pins/"])
@pytest.mark.parametrize("kind", OUTAGES)
def test_an_outage_ends_the_check_and_is_no_damage(
    store: MemoryStore, kind: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.stores.creating.FIRST_WAIT_S", 0.0)
    registry = registry_on(store)
    get, objects = store.get, store.objects

    def failing(key: str, **options: int) -> bytes:
        if key.startswith(prefix):
            raise OUTAGES[kind]
        return get(key, **options)

    def unlisted(asked: str) -> Iterator[StoredObject]:
        if asked and prefix.startswith(asked) and prefix != "blobs/":
            raise OUTAGES[kind]
        return objects(asked)

    monkeypatch.setattr(store, "get", failing)
    monkeypatch.setattr(store, "objects", unlisted)
    with pytest.raises(StoreError) as outage:
        list(fsck(registry, Trust()))
    assert outage.value is OUTAGES[kind]


def test_every_alias_of_a_version_is_looked_at(store: MemoryStore) -> None:
    """Both moves are of one version, and only the first has expired."""
    clock = HandClock()
    writer, soon = writer_on(store, clock), HandClock(clock.now_s + 1).utc()
    promote(writer, NAME, "canary", TWO.digest, note=Note(expires=soon))
    promote(writer, NAME, "stable", TWO.digest)
    clock.now_s += 2
    found = list(fsck(writer.registry, Trust()))
    assert [(one.code, one.is_damage) for one in found] == [("E_STALE", False)]
    assert "@canary" in found[0].place


class Swept(Wrapped):
    """A collector takes what it may while a manifest is being read."""

    clock: HandClock

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        if (word, key) == ("get", manifest_key(OLD.digest)):
            registry = registry_on(self.inner, self.clock)
            sweep(registry, Author("gc"), grace_s=GRACE_S, retention_s=RETENTION_S)
        return act()


def test_what_is_collected_during_the_check_is_no_damage() -> None:
    world = World()
    assert world.mark()
    world.clock.now_s += GRACE_S
    swept = Swept(world.store)
    swept.clock = world.clock
    found = list(fsck(registry_on(swept, world.clock), Trust()))
    assert [one.code for one in found if one.place.startswith(NAME)] == ["W_COLLECTED"]
    assert [one for one in found if one.is_damage] == []
