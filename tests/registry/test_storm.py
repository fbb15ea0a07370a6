"""Processes that publish and move one alias, some of them killed: four here, in short.

benchmarks/bench_registry.py runs eight of 250 on a folder and on S3.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.registry_storm import NAME, History, audit, package, storm
from specctl.registry import Author, Writer, init_registry, open_registry, push
from specctl.registry.trust import Trust


def test_concurrent_processes_lose_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "registry")
    init_registry(url)
    history = storm(url, num_workers=4, num_ops=6, num_kills=4, seed=7)
    found = audit(open_registry(url), history)
    assert history.num_told["done"] == 24
    assert found["num_kills"] == 4
    assert found["num_reads"] >= 20, "a reader that saw nothing shows nothing"
    assert found["num_entries"] >= found["num_acked"]


@pytest.mark.parametrize("lie", ["published", "moved"])
def test_the_audit_finds_an_acknowledged_loss(tmp_path: Path, lie: str) -> None:
    registry = init_registry(tmp_path / "registry")
    push(Writer(registry, Author("ann"), Trust()), package("one"), NAME)
    history = History(**{lie: {0: package("another").digest}})  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="lost"):
        audit(registry, history)
