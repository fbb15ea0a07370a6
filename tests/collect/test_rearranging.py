"""Compaction, pruning and merging beside writers, repeats and kills."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.collect import compacting, foreign, tables
from specctl.collect.commits import Commit
from specctl.collect.compacting import compact, prune
from specctl.collect.logs import CommitLog, read_commits
from specctl.collect.merging import merge
from specctl.collect.opening import open_log
from specctl.collect.reader import TraceSet
from specctl.collect.snapshots import exclude, take_snapshot
from specctl.collect.store import MAX_COMMIT_S, TraceWriter
from specctl.collect.verifying import verify
from specctl.errors import OutputError, SpecctlError, StoreError, TraceCorruptError, UsageError
from tests.collect.inspections import all_ok
from tests.collect.memory_store import OverwritingStore
from tests.collect.rounds import header
from tests.collect.sets import equal, rows, rows_of
from tests.collect.shim import Death, Shim
from tests.collect.small_rows import tables_of
from tests.collect.small_sets import again, collect

# --------------------------------------------------------------------------- pruning


def test_equal_rows_of_two_writers_are_two_files(tmp_path: Path) -> None:
    collect(tmp_path / "set", "a")
    again(tmp_path / "set", "a")
    assert len({segment.key for segment in read_commits_of(tmp_path / "set").segments}) == 4


def read_commits_of(root: Path) -> CommitLog:
    return read_commits(root, allow_repeats=True)


def test_pruning_beside_a_writer_takes_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer died behind its segments, long ago. A pruner has read the logs; then another writer
    commits the same rows, and then the pruner removes what it found to be old."""
    root = collect(tmp_path / "set", "a")
    with TraceWriter.open(root, header(), resume=True) as died:
        for name, table in tables_of(["b"]).items():
            died._write(name, table)
    old = time.time() - 2 * compacting.GRACE_S
    for path in (root / "data").iterdir():
        os.utime(path, (old, old))
    real = compacting.read_commits

    def read_then_commit(place: Any, **options: Any) -> CommitLog:
        log = real(place, **options)
        collect(root, "b")
        return log

    monkeypatch.setattr(compacting, "read_commits", read_then_commit)
    assert prune(root)[0] == 2
    assert TraceSet.open(root).prompt_ids == ("a", "b")


def test_a_writer_that_slept_before_its_record_does_not_acknowledge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segments may have been pruned since."""
    times = iter([0.0, MAX_COMMIT_S + 1, MAX_COMMIT_S + 1])
    monkeypatch.setattr("specctl.collect.store.elapsed_s", lambda: next(times))
    with (
        TraceWriter.open(tmp_path / "set", header()) as writer,
        pytest.raises(OutputError, match="within 3600 s"),
    ):
        writer.commit(["a"], tables_of(["a"]))
    assert TraceSet.open(tmp_path / "set").prompt_ids == ()


# --------------------------------------------------------------------------- repeats


def test_repeats_without_rows_are_dropped(tmp_path: Path) -> None:
    root = collect(tmp_path / "set", "a", "b", empty="a")
    again(root, "a", made={})
    other = collect(tmp_path / "other", "ac", empty="ac")
    assert compact(root).num_repeats == 1
    assert TraceSet.open(root).prompt_ids == ("a", "b")
    done = merge([str(root), str(other)], str(tmp_path / "out"))
    assert (done.num_prompts, done.num_repeats) == (3, 1)


def test_a_prompt_with_rows_is_no_repeat_of_one_without(tmp_path: Path) -> None:
    root = collect(tmp_path / "set", "a", empty="a")
    again(root, "a")
    with pytest.raises(TraceCorruptError, match="'a', table rounds"):
        compact(root)


def test_merge_that_goes_on_compares_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "_run", all_ok)
    one, same = collect(tmp_path / "one", "ab"), collect(tmp_path / "same", "bc")
    out = str(tmp_path / "out")
    merge([str(one)], out)
    done = merge([str(same)], out, resume=True)
    assert (done.num_prompts, done.num_repeats) == (1, 1)
    other = tmp_path / "different"
    with TraceWriter.open(other, header()) as writer:
        writer.commit(["a"], rows_of("a", rounds=1))
    with pytest.raises(TraceCorruptError, match=r"'a'.*rows of .*out/commits.*others in .*differ"):
        merge([str(other)], out, resume=True)


def test_commits_of_many_repeats_are_read_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large commit beside small ones, in both orders: work grows with rows, not with pairs."""
    read: list[str] = []
    real = tables.read_tables

    def counted(place: Any, commit: Commit, **options: Any) -> Any:
        read.append(commit.digest)
        return real(place, commit, **options)

    monkeypatch.setattr(tables, "read_tables", counted)
    root = collect(tmp_path / "set", "abcdef")
    for prompt in "abcdef":
        again(root, prompt)
    assert compact(root).num_repeats == 6
    assert len(read) == len(set(read)) == 7


def test_groups_are_summed_as_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    class Counted:
        prompt_ids: tuple[str, ...] = ()

        @property
        def num_rows(self) -> int:
            nonlocal asked
            asked += 1
            return 1

    assert len(list(compacting._groups([Counted()] * 500, 100, set()))) == 5  # type: ignore[list-item]
    assert asked <= 3 * 500


def test_way_out_of_different_repeats(tmp_path: Path) -> None:
    root = collect(tmp_path / "set", "ab", "c")
    again(root, "a", "d", made=rows_of("a", "d", rounds=1))
    with pytest.raises(TraceCorruptError, match="snapshot TRACES --without COMMIT") as told:
        compact(root)
    named = told.value.found.removeprefix("others in ")
    log = open_log(root, allow_repeats=True)
    taken = take_snapshot(*exclude(log, [named]))
    assert (taken.num_excluded_prompts, taken.num_excluded_rows) == (1, 2 * 23)
    assert "46 rows, and 1 prompt that no other commit has" in taken.render()
    assert TraceSet.open(taken.reference).prompt_ids == ("a", "b", "c")
    first = next(commit for commit in log.commits if commit.prompt_ids == ["a", "b"])
    assert take_snapshot(*exclude(log, [first.digest])).num_prompts == 3
    with pytest.raises(TraceCorruptError, match="'a' in two"):
        exclude(log, [next(c.key for c in log.commits if c.prompt_ids == ["c"])])
    with pytest.raises(UsageError, match="one of the 3 commits in use"):
        exclude(log, ["sha256:" + "0" * 64])


# --------------------------------------------------------------------------- kills, stores


@pytest.mark.parametrize("verb", ["compact", "merge"])
def test_killed_at_many_operations_and_done_again(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Death at every 15th operation, but for those of the child that inspects the sources."""
    monkeypatch.setattr(foreign, "_run", all_ok)
    source = collect(tmp_path / "source", "ab", "c")
    before = rows(source)

    def act(root: Path) -> None:
        if verb == "compact":
            compact(root)
        else:
            merge([str(root)], f"{root}-out", resume=True)

    num_operations = die_everywhere(source, tmp_path, act, before)
    assert num_operations > 30
    assert equal(rows(source), before)


def die_everywhere(
    source: Path, folder: Path, act: Callable[[Path], None], before: dict[str, Any]
) -> int:
    """Returns the number of operations; the set, and what `act` makes of it, hold all rows."""
    at = 0
    while True:
        root = Path(shutil.copytree(source, folder / str(at)))
        shim = Shim("simulated death", at)
        try:
            with shim.installed():
                act(root)
        except (Death, SpecctlError):
            assert shim.hit is not None
        assert equal(rows(root), before)
        act(root)
        out = Path(f"{root}-out")
        assert equal(rows(out if out.exists() else root), before)
        if shim.hit is None:
            return shim.count
        at += 15


def test_rearranging_probes_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = OverwritingStore()
    store.put_new("trace.json", header().to_bytes())
    for module in (compacting, "specctl.collect.verifying"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.open_place", lambda _: store.place)
    with pytest.raises(StoreError, match="one that overwrote it"):
        compact("set")
    with pytest.raises(StoreError, match="one that overwrote it"):
        verify("set", quarantine=True)
    assert verify("set").is_whole  # writes nothing, so it need not ask


def test_a_commit_alone_in_its_group_loses_its_repeats(tmp_path: Path) -> None:
    root = collect(tmp_path / "set", "ab")
    again(root, "a")
    assert compact(root, target_rows=60).num_repeats == 1
    assert TraceSet.open(root).prompt_ids == ("a", "b")
