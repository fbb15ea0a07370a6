"""Registries to pull from, and who pulls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.signing import SigningKey, Trust, TrustedKey, TrustRecord
from specctl.errors import SpecctlError
from specctl.registry import (
    Author,
    Package,
    Writer,
    parse_reference,
    promote,
    pull,
    push,
    read_package,
)
from tests.registry.worlds import NAME, reader_in, registry_on, writer_on
from tests.stores.memory import MemoryStore

GOLDEN = Path(__file__).parents[2] / "golden" / "artifacts-v1"
PROD = parse_reference(f"{NAME}@prod")


@pytest.fixture(scope="module")
def real() -> tuple[Package, Package]:
    """Two artifacts that load."""
    return read_package(GOLDEN / "chain"), read_package(GOLDEN / "eagle2")


@pytest.fixture
def store(real: tuple[Package, Package]) -> MemoryStore:
    """Both published, `prod` at the second."""
    store = MemoryStore()
    writer = writer_on(store)
    for one in real:
        push(writer, one, NAME)
        promote(writer, NAME, "prod", one.digest)
    return store


def code_of(attempt: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(SpecctlError) as refused:
        attempt(*arguments, **options)
    return str(refused.value.code)  # type: ignore[attr-defined]


def trusting(key: SigningKey, *roles: Any, name: str = "*") -> TrustRecord:
    trusted = TrustedKey.of(
        key.public_key, names=(name,), roles=roles, not_before="2020-01-01T00:00:00Z"
    )
    return TrustRecord(trust_version=1, keys=(trusted,), require=("qwen3*",), threshold=1)


def signed_writer(store: MemoryStore, *keys: SigningKey, trust: Trust | None = None) -> Writer:
    return Writer(registry_on(store), Author("ann", keys), trust or Trust())


def pull_as(store: MemoryStore, folder: Path, record: TrustRecord) -> Any:
    return pull(registry_on(store), PROD, reader_in(folder, Trust(record)))
