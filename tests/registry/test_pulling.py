"""A pull: nothing older than seen, nothing unsigned where a signature is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts.signing import SigningKey, Trust
from specctl.registry import (
    Note,
    Package,
    Reference,
    parse_reference,
    promote,
    pull,
    pull_offline,
    push,
)
from specctl.registry.layout import log_key
from tests.artifacts.examples import PAIR
from tests.registry.pulls import (
    PROD,
    code_of,
    pull_as,
    real,
    signed_writer,
    store,
    trusting,
)
from tests.registry.worlds import (
    NAME,
    HandClock,
    package,
    reader_in,
    registry_on,
    writer_on,
)
from tests.stores.memory import MemoryStore

__all__ = ["real", "store"]  # fixtures


def test_a_reference_gives_what_it_means_now(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    reader = reader_in(tmp_path)
    pulled = pull(registry_on(store), PROD, reader, expect=PAIR)
    assert pulled.artifact.digest == real[1].digest
    assert {p.name: p.read_bytes() for p in pulled.folder.iterdir()} == dict(real[1].files)
    older = Reference(NAME, digest=real[0].digest)
    assert pull(registry_on(store), older, reader).artifact.digest == real[0].digest


@pytest.mark.parametrize(
    ("text", "code"),
    [(NAME, "E_NAME"), (f"{NAME}@next", "E_UNKNOWN_ALIAS"), ("other@prod", "E_UNKNOWN_NAME"),
     (f"{NAME}@sha256:{'0' * 64}", "E_MISSING")],
)  # fmt: skip
def test_what_means_nothing_is_refused(
    store: MemoryStore, tmp_path: Path, text: str, code: str
) -> None:
    reference = parse_reference(text)
    assert code_of(pull, registry_on(store), reference, reader_in(tmp_path)) == code


def test_an_older_history_is_refused(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """Family 16, replayed: the registry is put back to before the last move."""
    reader, before = reader_in(tmp_path), dict(store.kept)
    promote(writer_on(store), NAME, "prod", real[0].digest)
    pull(registry_on(store), PROD, reader)
    store.kept = before
    assert code_of(pull, registry_on(store), PROD, reader) == "E_ROLLBACK"
    assert pull(registry_on(store), PROD, reader_in(tmp_path / "another user"))


def test_a_forked_history_is_refused(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """As many generations, or more, but another one where the user looked."""
    reader, before = reader_in(tmp_path), dict(store.kept)
    pull(registry_on(store), PROD, reader)
    store.kept = before
    store.delete(log_key(NAME, 3))
    for _ in range(2):
        promote(writer_on(store, actor="mallory"), NAME, "prod", real[1].digest)
    assert code_of(pull, registry_on(store), PROD, reader) == "E_ROLLBACK"


def test_a_floor_is_not_raised_by_a_pull_that_failed(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """tough, CVE-2025-2888: what was not checked must not lock the user out."""
    reader, before = reader_in(tmp_path), dict(store.kept)
    promote(writer_on(store), NAME, "prod", real[0].digest)
    blobs = [key for key in store.kept if key.startswith("blobs/")]
    for key in blobs:
        store.kept[key] = store.kept[key][:-1] + b"?"
    assert code_of(pull, registry_on(store), PROD, reader) == "E_DIGEST"
    assert not any(reader.cache.root.rglob("config.json"))
    store.kept = before
    pull(registry_on(store), PROD, reader)


def test_an_entry_past_its_time_is_refused(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """Family 17, frozen: the entry that the answer rests on, whatever came after it."""
    clock = HandClock()
    until = Note(expires=HandClock(clock.now_s + 1).utc())
    promote(writer_on(store, clock), NAME, "prod", real[0].digest, note=until)
    pull(registry_on(store, clock), PROD, reader_in(tmp_path))
    clock.now_s += 1
    assert code_of(pull, registry_on(store, clock), PROD, reader_in(tmp_path)) == "E_STALE"
    push(writer_on(store, clock), package("newer"), NAME)
    assert code_of(pull, registry_on(store, clock), PROD, reader_in(tmp_path)) == "E_STALE"


def test_what_expires_beside_an_alias_does_not_stop_it(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """A nightly version with an expiry, pushed last: `prod` has none."""
    clock = HandClock()
    until = Note(expires=HandClock(clock.now_s + 1).utc())
    push(writer_on(store, clock), package("nightly"), NAME, note=until)
    clock.now_s += 2
    assert pull(registry_on(store, clock), PROD, reader_in(tmp_path)).artifact
    nightly = Reference(NAME, digest=package("nightly").digest)
    assert code_of(pull, registry_on(store, clock), nightly, reader_in(tmp_path)) == "E_STALE"


def test_a_floor_is_not_raised_by_what_the_loader_refuses(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """The bytes are right, the pair is not: the registry may be put back to before that."""
    reader, before = reader_in(tmp_path), dict(store.kept)
    promote(writer_on(store), NAME, "prod", real[0].digest)
    other = PAIR.model_copy(update={"target_digest": "sha256:" + "e" * 64})
    assert code_of(pull, registry_on(store), PROD, reader, expect=other) == "E_TARGET"
    store.kept = before
    assert pull(registry_on(store), PROD, reader, expect=PAIR).artifact.digest == real[1].digest


def test_offline_is_what_was_pulled_and_checked_again(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    reader, clock = reader_in(tmp_path), HandClock()
    registry = registry_on(store, clock)
    assert code_of(pull_offline, registry.url, PROD, reader) == "E_OFFLINE"
    pull(registry, PROD, reader)
    pulled = pull_offline(registry.url, PROD, reader, expect=PAIR)
    assert pulled.artifact.digest == real[1].digest
    assert pulled.remembered == clock.utc()
    by_digest = Reference(NAME, digest=real[1].digest)
    assert pull_offline(registry.url, by_digest, reader).artifact.digest == real[1].digest
    card = pulled.folder / "README.md"
    card.chmod(0o600)
    card.write_bytes(card.read_bytes() + b"!")
    assert code_of(pull_offline, registry.url, PROD, reader) == "E_DIGEST"
    assert code_of(pull, registry, PROD, reader) == "E_DIGEST"


# ------------------------------------------------------------------ signatures


def test_a_name_that_requires_signatures_has_them_or_is_refused(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """Unsigned; signed by an unknown key; the version signed but not the move; all of it."""
    key, unknown = SigningKey.generate(), SigningKey.generate()
    record = trusting(key, "publisher", "promoter")
    assert code_of(pull_as, store, tmp_path, record) == "E_SIG"
    for author in ((unknown,), (key,)):
        writer = signed_writer(store, *author)
        push(writer, real[0], NAME)
        assert code_of(pull_as, store, tmp_path, record) == "E_SIG"
        promote(signed_writer(store), NAME, "prod", real[0].digest)
        assert code_of(pull_as, store, tmp_path, record) == "E_SIG"
    promote(signed_writer(store, key), NAME, "prod", real[0].digest)
    assert pull_as(store, tmp_path, record).artifact.digest == real[0].digest
    assert code_of(pull_as, store, tmp_path, trusting(key, "publisher")) == "E_SIG"


def test_signed_entries_do_not_stand_for_the_artifact_s_own_signature(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """Who may write removes the signatures beside the manifest; the history is signed well."""
    key = SigningKey.generate()
    push(signed_writer(store, key), real[0], NAME)
    promote(signed_writer(store, key), NAME, "prod", real[0].digest)
    record = trusting(key, "publisher", "promoter")
    assert pull_as(store, tmp_path / "before", record)
    for name in [name for name in store.kept if name.startswith("signatures/")]:
        store.delete(name)
    assert code_of(pull_as, store, tmp_path / "after", record) == "E_SIG"


@pytest.mark.parametrize("lost", ["entry", "artifact"])
def test_a_version_that_readers_would_refuse_is_not_promoted(
    store: MemoryStore, real: tuple[Package, Package], lost: str
) -> None:
    """The promoter's own entry is signed; the version's is not, or its artifact is not."""
    key = SigningKey.generate()
    trust = Trust(trusting(key, "publisher", "promoter"))
    push(signed_writer(store, key), real[0], NAME)
    if lost == "entry":
        push(signed_writer(store), real[0], NAME)  # the newest publication of it is unsigned
    else:
        for name in [name for name in store.kept if name.startswith("signatures/")]:
            store.delete(name)
    num_entries = len(registry_on(store).log(NAME).entries)
    promoter = signed_writer(store, key, trust=trust)
    assert code_of(promote, promoter, NAME, "prod", real[0].digest) == "E_SIG"
    assert len(registry_on(store).log(NAME).entries) == num_entries
    push(signed_writer(store, key), real[0], NAME)
    assert promote(signed_writer(store, key, trust=trust), NAME, "prod", real[0].digest)


def test_a_signature_is_good_for_its_own_name_and_place(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """Family 15: a signed entry copied to another registry, a signed artifact to another name."""
    key = SigningKey.generate()
    writer = signed_writer(store, key)
    push(writer, real[0], "qwen3-other")
    push(signed_writer(store), real[0], NAME)
    promote(signed_writer(store, key), NAME, "prod", real[0].digest)
    record = trusting(key, "publisher", "promoter")
    assert code_of(pull_as, store, tmp_path, record) == "E_SIG"
    other = MemoryStore()
    registry_on(other)
    marker = other.kept["registry.json"]
    other.kept = {**store.kept, "registry.json": marker}
    assert code_of(pull_as, other, tmp_path, record) == "E_LOG"


def test_a_writer_is_told_before_readers_refuse(
    store: MemoryStore, real: tuple[Package, Package]
) -> None:
    key = SigningKey.generate()
    asks = Trust(trusting(key, "publisher"))
    num_entries = len(registry_on(store).log(NAME).entries)
    assert code_of(push, signed_writer(store, trust=asks), real[0], NAME) == "E_SIG"
    push(signed_writer(store, key, trust=asks), real[0], NAME)
    promoter = signed_writer(store, key, trust=asks)
    assert code_of(promote, promoter, NAME, "prod", real[0].digest) == "E_SIG"
    assert len(registry_on(store).log(NAME).entries) == num_entries + 1
