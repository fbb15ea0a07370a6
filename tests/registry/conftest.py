"""Artifacts that load, stores without waits."""

from __future__ import annotations

import pytest

from specctl.artifacts import Origin, save_artifact
from specctl.registry import Package, promote, push, read_package
from tests.artifacts.examples import EVIDENCE, PAIR, POLICIES
from tests.registry.worlds import NAME, writer_on
from tests.stores.memory import MemoryStore


@pytest.fixture(autouse=True)
def _no_waits(no_waits: None) -> None:
    """Retries follow one another at once."""


@pytest.fixture(scope="package")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Package]:
    """Two artifacts that load."""
    packages = []
    for kind in ("chain", "eagle2"):
        folder = tmp_path_factory.mktemp("real") / kind
        origin = Origin(pair=PAIR, evidence=EVIDENCE)
        save_artifact(folder, POLICIES[kind], origin, card=f"# {kind}\n")
        packages.append(read_package(folder))
    return packages[0], packages[1]


@pytest.fixture
def published(real: tuple[Package, Package]) -> MemoryStore:
    """A registry with both, unsigned, and `prod` at the second."""
    store = MemoryStore()
    writer = writer_on(store)
    for one in real:
        push(writer, one, NAME)
        promote(writer, NAME, "prod", one.digest)
    return store
