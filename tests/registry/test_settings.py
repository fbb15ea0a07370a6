"""Settings of a registry: they tighten for everybody, and delegate by a root that a user trusts."""

from __future__ import annotations

from pathlib import Path

from specctl.artifacts.signing import SigningKey, Trust, TrustRecord
from specctl.registry import Package, promote, pull, push
from tests.registry.pulls import (
    PROD,
    code_of,
    pull_as,
    real,
    signed_writer,
    store,
    trusting,
)
from tests.registry.trust_records import NOBODY, revoked, settle
from tests.registry.worlds import NAME, reader_in, registry_on
from tests.stores.memory import MemoryStore

__all__ = ["real", "store"]  # fixtures


def test_settings_require_for_everybody_and_delegate_by_a_root(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    root, publisher = SigningKey.generate(), SigningKey.generate()
    settle(store, trusting(publisher, "publisher", "promoter"), root)
    assert code_of(pull, registry_on(store), PROD, reader_in(tmp_path)) == "E_SIG"
    push(signed_writer(store, publisher, trust=Trust(trusting(root, "root"))), real[0], NAME)
    writer = signed_writer(store, publisher, trust=Trust(trusting(root, "root")))
    promote(writer, NAME, "prod", real[0].digest)
    assert pull_as(store, tmp_path, trusting(root, "root")).artifact.digest == real[0].digest
    assert code_of(pull_as, store, tmp_path, trusting(SigningKey.generate(), "root")) == "E_SIG"


def test_unsigned_settings_only_tighten_whoever_wrote_them_last(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """Requirements and revocations of all settings add up for who trusts no root."""
    key, root = SigningKey.generate(), SigningKey.generate()
    push(signed_writer(store, key), real[0], NAME)
    promote(signed_writer(store, key), NAME, "prod", real[0].digest)
    believes = trusting(key, "publisher", "promoter").model_copy(update={"require": ()})
    assert pull_as(store, tmp_path / "1", believes)
    settle(store, revoked(trusting(key, "publisher")), root)
    assert code_of(pull_as, store, tmp_path / "2", believes) == "E_SIG"
    settle(store, NOBODY.model_copy(update={"require": ("qwen3*",)}))
    settle(store, NOBODY)
    assert code_of(pull_as, store, tmp_path / "3", believes) == "E_SIG"
    assert code_of(pull_as, store, tmp_path / "4", NOBODY) == "E_SIG"


def test_who_trusts_a_root_uses_no_registry_without_its_settings(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """A mirror that leaves the settings out serves a first-time user nothing."""
    root, publisher = SigningKey.generate(), SigningKey.generate()
    push(signed_writer(store, publisher), real[0], NAME)
    promote(signed_writer(store, publisher), NAME, "prod", real[0].digest)
    settle(store, trusting(publisher, "publisher", "promoter"), root)
    by_root = trusting(root, "root").model_copy(update={"require": ()})
    assert pull_as(store, tmp_path / "1", by_root)
    store.delete("log/_settings/000000000000.json")
    assert code_of(pull_as, store, tmp_path / "2", by_root) == "E_SIG"
    writer = signed_writer(store, publisher, trust=Trust(by_root))
    assert code_of(promote, writer, NAME, "prod", real[0].digest) == "E_SIG"


def test_a_root_may_be_that_of_some_registries_alone(
    store: MemoryStore, real: tuple[Package, Package], tmp_path: Path
) -> None:
    """An unsigned registry beside a signed one stays usable, and only that."""
    root, publisher = SigningKey.generate(), SigningKey.generate()

    def scoped(*urls: str) -> TrustRecord:
        key = trusting(root, "root").keys[0].model_copy(update={"registries": urls})
        return NOBODY.model_copy(update={"keys": (key,)})

    assert pull_as(store, tmp_path / "1", scoped("elsewhere"))
    assert code_of(pull_as, store, tmp_path / "2", scoped("elsewhere", "memory")) == "E_SIG"
    push(signed_writer(store, publisher), real[0], NAME)
    promote(signed_writer(store, publisher), NAME, "prod", real[0].digest)
    settle(store, trusting(publisher, "publisher", "promoter"), root)
    assert pull_as(store, tmp_path / "3", scoped("memory"))
    # Where it is no root it delegates nothing; what it requires is asked for all the same.
    assert code_of(pull_as, store, tmp_path / "4", scoped("elsewhere")) == "E_SIG"


def test_settings_cannot_be_loosened_without_the_root(store: MemoryStore, tmp_path: Path) -> None:
    """An attacker who may write appends empty settings; a user who trusts a root sees it."""
    root = SigningKey.generate()
    settle(store, trusting(root, "publisher"), root)
    nobody = TrustRecord(trust_version=1, keys=(), require=(), threshold=1)
    settle(store, nobody)
    assert code_of(pull_as, store, tmp_path, trusting(root, "root")) == "E_SIG"


def test_settings_put_back_are_refused(store: MemoryStore, tmp_path: Path) -> None:
    reader = reader_in(tmp_path)
    nobody = TrustRecord(trust_version=1, keys=(), require=(), threshold=1)
    settle(store, nobody)
    pull(registry_on(store), PROD, reader)
    store.delete("log/_settings/000000000000.json")
    assert code_of(pull, registry_on(store), PROD, reader) == "E_ROLLBACK"
