"""Processes that publish and move one alias, some of them killed; a reader sees what it sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.registry_storm import NAME, History, audit, package, storm
from specctl.registry import Writer, init_registry, open_registry, push
from specctl.registry.trust import Trust


@pytest.mark.parametrize(
    ("num_workers", "num_ops", "num_kills"),
    [(4, 6, 4), pytest.param(8, 250, 60, marks=pytest.mark.nightly)],
)
def test_concurrent_processes_lose_nothing(
    tmp_path: Path, num_workers: int, num_ops: int, num_kills: int
) -> None:
    """`benchmarks/bench_registry.py` does the same on S3."""
    url = str(tmp_path / "registry")
    init_registry(url)
    history = storm(url, num_workers=num_workers, num_ops=num_ops, num_kills=num_kills, seed=7)
    found = audit(open_registry(url), history)
    assert history.num_told["done"] == num_workers * num_ops
    assert found["num_kills"] == num_kills
    assert found["num_reads"] >= 20, "a reader that saw nothing shows nothing"
    assert found["num_entries"] >= found["num_acked"]


@pytest.mark.parametrize("lie", ["published", "moved"])
def test_the_audit_finds_an_acknowledged_loss(tmp_path: Path, lie: str) -> None:
    registry = init_registry(tmp_path / "registry")
    push(Writer(registry, Trust(), "ann"), package("one"), NAME)
    history = History(**{lie: {0: package("another").digest}})  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="lost"):
        audit(registry, history)
