"""What a pruner may remove: segments that are old, by the store's clock, and needed by nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from specctl.collect.compacting import GRACE_S, compact, prune
from specctl.collect.exporting import export
from specctl.collect.merging import merge
from specctl.collect.opening import open_log
from specctl.collect.reader import TraceSet
from specctl.collect.snapshots import take_snapshot
from specctl.collect.store import TraceWriter
from specctl.collect.verifying import verify
from specctl.errors import OutputError, StoreError, TraceCorruptError
from specctl.stores.probing import now_s
from tests.collect.memory_store import StaleStore
from tests.collect.rounds import header
from tests.collect.small_rows import tables_of
from tests.collect.small_sets import collect


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return collect(tmp_path / "set", "a", "b")


def names(root: Path) -> set[str]:
    return {path.name for path in (root / "data").iterdir()}


def age(paths: Iterable[Path]) -> None:
    """As if they were written long before the grace."""
    for path in paths:
        old = path.stat().st_mtime - 2 * GRACE_S
        os.utime(path, (old, old))


def test_a_snapshot_that_cannot_be_resolved_keeps_all_files(root: Path) -> None:
    """A lost record would leave the files that the snapshot still names without a name."""
    take_snapshot(open_log(root))
    [log] = (root / "commits").iterdir()
    (log / "00000002.json").unlink()
    before = names(root)
    with pytest.raises(TraceCorruptError, match="expected 2 commits, found 1"):
        prune(root, grace_s=-60.0)
    assert names(root) == before


def test_what_was_superseded_just_now_is_kept_however_old_it_is(root: Path) -> None:
    """A fit that opened the set before the compaction still reads it."""
    age((root / "data").iterdir())
    before = TraceSet.open(root)
    compact(root)
    assert prune(root) == (0, 0)
    assert before.scan("nodes").collect().height > 0
    age((root / "commits").glob("*/*.json"))
    assert prune(root)[0] == 4


def test_a_clock_that_is_ahead_prunes_nothing_young(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a writer's segments and its record: they are young to the store, if not to us."""
    with TraceWriter.open(root, header(), resume=True) as writer:
        for name, table in tables_of(["c"]).items():
            writer._write(name, table)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3 * GRACE_S)
    assert prune(root) == (0, 0)
    age((root / "data").iterdir())
    assert prune(root)[0] == 2
    assert TraceSet.open(root).prompt_ids == ("a", "b")


def test_a_listing_without_the_newest_object_gives_no_time() -> None:
    store = StaleStore()
    with pytest.raises(StoreError, match="a listing with what was just stored"):
        now_s(store)
    assert store.kept == {}


def test_only_segments_are_removed(root: Path) -> None:
    (root / "data" / "readme.txt").write_text("mine")
    (root / "data" / "other").mkdir()
    (root / "data" / "other" / ("rounds-" + "0" * 64 + ".parquet")).write_bytes(b"mine")
    (root / "data" / ("rounds-" + "0" * 64 + ".parquet")).write_bytes(b"orphan")
    assert prune(root, grace_s=-60.0)[0] == 1
    assert names(root) >= {"readme.txt", "other"}
    assert len(list((root / "data" / "other").iterdir())) == 1


@pytest.mark.parametrize("where", ["data/x", "commits/x/y", "x"])
def test_a_set_in_a_set_is_refused(root: Path, where: str) -> None:
    with pytest.raises(OutputError, match=r"a folder outside of other sets, found one in"):
        merge([str(root)], str(root / where))
    assert not (root / where).exists()


@pytest.mark.parametrize("where", ["", "data", "commits"])
def test_an_export_into_a_set_is_refused(root: Path, where: str) -> None:
    with pytest.raises(OutputError, match="outside of trace sets"):
        export(TraceSet.open(root), root / where, format="csv", tokens="drop")
    assert TraceSet.open(root).prompt_ids == ("a", "b")


def damaged_compaction(root: Path) -> Path:
    """Of a compaction and `c`, noted, while the files that it joined are there, and old."""
    compact(root)
    collect(root, "c")
    compact(root)
    [commit] = open_log(root).commits
    path = commit.files[0].path(root)
    path.write_bytes(path.read_bytes()[:-1])
    verify(root, quarantine=True)
    age([*(root / "data").iterdir(), *(root / "commits").glob("*/*.json")])
    return path


def test_what_a_damaged_compaction_joined_is_kept(root: Path) -> None:
    """They may be the only whole rows of prompts that were acknowledged."""
    damaged_compaction(root)
    before = names(root)
    assert compact(root).num_commits == 1, "a quarantined commit holds up no compaction"
    assert prune(root) == (0, 0)
    assert names(root) == before


def test_what_a_mended_compaction_joined_goes(root: Path) -> None:
    path = damaged_compaction(root)
    [note] = (root / "quarantine").iterdir()
    note.unlink()
    assert prune(root)[0] == 8
    assert path.name in names(root)
