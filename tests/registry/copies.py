"""What is copied, and what is compared afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts.facts import utc_now, utc_seconds
from specctl.artifacts.signing import SigningKey, Trust
from specctl.registry import (
    Author,
    Registry,
    Writer,
    init_registry,
    pin,
    promote,
    push,
    read_package,
)
from specctl.registry.garbage import mark, sweep
from tests.registry.worlds import NAME, HandClock

GOLDEN = Path(__file__).parents[2] / "golden" / "artifacts-v1"


@pytest.fixture
def source(tmp_path: Path) -> Registry:
    """Two signed versions of a name, one pinned, `prod` at the second."""
    key = SigningKey.generate()
    writer = Writer(init_registry(tmp_path / "source"), Author("alice", (key,)), Trust.load())
    for kind in ("chain", "eagle2"):
        package = read_package(GOLDEN / kind)
        push(writer, package, NAME)
    pin(writer, package.digest, reason="shipped")
    promote(writer, NAME, "prod", package.digest)
    return writer.registry


def histories(registry: Registry) -> dict[str, list[bytes]]:
    return {n: [one.envelope for one in registry.log(n).entries] for n in registry.names()}


def collected(source: Registry) -> str:
    """Garbage collection takes the version that nothing needs; returns it."""
    prod = source.log(NAME).state.aliases["prod"].digest
    (other,) = set(source.log(NAME).state.versions) - {prod}
    source.clock = clock = HandClock(utc_seconds(utc_now()) + 600)  # behind what the store dates
    mark(source, Author("gc"), retention_s=0.0)
    clock.now_s += 7200
    sweep(source, Author("gc"), grace_s=7200, retention_s=0.0)
    return other
