"""Sets that change under their readers: snapshots, compaction, merging, quarantine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from specctl.collect.compacting import compact, prune
from specctl.collect.domain import domain_of
from specctl.collect.exporting import export
from specctl.collect.header import TraceHeader
from specctl.collect.logs import read_commits
from specctl.collect.merging import merge
from specctl.collect.opening import open_log
from specctl.collect.places import open_place
from specctl.collect.reader import TraceSet
from specctl.collect.snapshots import take_snapshot
from specctl.collect.store import TraceWriter
from specctl.collect.verifying import verify
from specctl.errors import TraceCorruptError, TraceError, TraceMismatchError
from tests.cli.command import passes, specctl
from tests.collect.rounds import header
from tests.collect.sets import collect, equal, flip, rows, rows_of, segments


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return collect(tmp_path / "traces", "ab", "c", "d")


# --------------------------------------------------------------------------- snapshots


def test_snapshot_is_what_was_there_and_stays_it(root: Path) -> None:
    taken = take_snapshot(open_log(root))
    assert (taken.digest, taken.num_prompts) == (TraceSet.open(root).digest, 4)
    with TraceWriter.open(root, header(), resume=True) as writer:
        writer.commit(["e"], rows_of("e"))
    assert TraceSet.open(root).prompt_ids == ("a", "b", "c", "d", "e")
    frozen = TraceSet.open(taken.reference)
    assert frozen.prompt_ids == ("a", "b", "c", "d")
    assert frozen.digest == taken.digest != TraceSet.open(root).digest


def test_snapshot_that_is_not_there_or_not_itself_is_refused(root: Path) -> None:
    with pytest.raises(TraceError, match="--list"):
        TraceSet.open(f"{root}@sha256:{'0' * 64}")
    taken = take_snapshot(open_log(root))
    [path] = (root / "snapshots").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceCorruptError, match="its name is the digest of"):
        TraceSet.open(taken.reference)


def test_records_of_an_unknown_kind_are_refused(root: Path) -> None:
    [log] = (root / "commits").iterdir()
    path = log / "00000001.json"
    record = json.loads(path.read_bytes())
    for change in (
        {"later": 1},
        {"trace_version": 2},
        {"epoch": 0},
        {"opens": "x"},
        {"opens": "\n"},
    ):
        path.write_text(json.dumps(record | change, sort_keys=True, separators=(",", ":")))
        with pytest.raises(TraceError, match="00000001"):
            TraceSet.open(root)


# --------------------------------------------------------------------------- compaction


def test_what_a_snapshot_alone_needs_is_verified(root: Path) -> None:
    """Superseded files hold the same keys as those in use, and are damaged like them."""
    [first, *_] = open_log(root).segments
    take_snapshot(open_log(root))
    compact(root)
    assert verify(root).is_whole
    first.path(root).write_bytes(b"")
    assert [damage.what for damage in verify(root).damages] == [first.key]


def test_compaction_changes_no_row_and_no_snapshot(root: Path) -> None:
    taken, before = take_snapshot(open_log(root)), rows(root)
    done = compact(root)
    assert (done.num_commits_before, done.num_commits, done.num_repeats) == (3, 1, 0)
    assert equal(rows(root), before)
    assert equal(rows(taken.reference), before)
    assert compact(root).num_commits == 1  # nothing to do is fine


def test_compaction_keeps_the_order_within_commits(root: Path) -> None:
    before = rows(root)
    compact(root)
    assert rows(root)["nodes"].equals(before["nodes"])


def test_large_commits_are_left_alone(root: Path) -> None:
    digests = {commit.digest for commit in read_commits(root).commits}
    compact(root, target_rows=1)
    assert {commit.digest for commit in read_commits(root).commits} == digests


def test_collector_goes_on_while_its_commits_are_compacted(root: Path) -> None:
    with TraceWriter.open(root, header(), resume=True) as writer:
        writer.commit(["e"], rows_of("e"))
        compact(root)
        writer.commit(["f"], rows_of("f"))
    assert TraceSet.open(root).prompt_ids == tuple("abcdef")


def test_pruning_removes_what_nobody_needs(root: Path) -> None:
    taken = take_snapshot(open_log(root))
    with TraceWriter.open(root, header(), resume=True) as writer:
        writer.commit(["e"], rows_of("e"))
    (root / "data" / ("rounds-" + "0" * 64 + ".parquet")).write_bytes(b"orphan")
    before = rows(root)
    compact(root)
    assert prune(root) == (0, 0)  # all are younger than the grace
    num_pruned, _ = prune(root, grace_s=0.0)
    assert num_pruned == 3  # the tables of `e`, which no snapshot has, and the orphan
    assert equal(rows(root), before)
    assert TraceSet.open(taken.reference).prompt_ids == tuple("abcd")
    assert verify(root).is_whole


def repeat(root: Path, prompt: str, rounds: int) -> None:
    """Commits a prompt as a writer would that does not know of the others."""
    with TraceWriter.named(open_place(root), "another") as writer:
        writer.committed.clear()
        writer.commit([prompt], rows_of(prompt, rounds=rounds))


def test_equal_repeats_are_dropped_and_different_ones_named(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "other")
    before = rows(root)
    repeat(root, "c", rounds=2)
    with pytest.raises(TraceCorruptError, match="'c' in two"):
        TraceSet.open(root)
    assert compact(root).num_repeats == 1
    assert equal(rows(root), before)
    repeat(tmp_path / "other", "c", rounds=1)
    with pytest.raises(TraceCorruptError, match=r"'c', table rounds: .*others in .*00000001"):
        compact(tmp_path / "other")


# --------------------------------------------------------------------------- merging, exporting


def test_merge_is_the_union(root: Path, tmp_path: Path) -> None:
    other = collect(tmp_path / "other", "de")
    done = merge([str(root), str(other)], str(tmp_path / "out"))
    assert (done.num_prompts, done.num_repeats) == (5, 1)
    assert equal(rows(tmp_path / "out"), rows(collect(tmp_path / "whole", "abcde")))
    again = merge([str(root), str(other)], str(tmp_path / "out"), resume=True)
    assert again.num_prompts == 0


def test_merge_refuses_other_rows_and_other_runs(root: Path, tmp_path: Path) -> None:
    other = collect(tmp_path / "other")
    with TraceWriter.open(other, header(), resume=True) as writer:
        writer.commit(["d"], rows_of("d", rounds=1))
    with pytest.raises(TraceCorruptError, match="prompt 'd', table rounds"):
        merge([str(root), str(other)], str(tmp_path / "out"))
    strange = collect(tmp_path / "strange", "z", made=header(collect={"max_new_tokens": 8}))
    with pytest.raises(TraceMismatchError, match="field collect"):
        merge([str(root), str(strange)], str(tmp_path / "out2"))


def on(machine: str) -> TraceHeader:
    """A header as it is made on a machine."""
    return header(collect={"max_new_tokens": 32, "domain": {"hardware": [machine]}})


def test_sets_of_several_machines_become_one_of_them_all(tmp_path: Path) -> None:
    sets = [
        collect(tmp_path / name, prompt, made=on(name))
        for name, prompt in (("H200", "a"), ("A100", "b"), ("H200-2", "c"))
    ]
    merge([str(one) for one in sets], str(tmp_path / "out"))
    assert domain_of(TraceSet.open(tmp_path / "out")).hardware == ("A100", "H200", "H200-2")
    merge([str(one) for one in sets], str(tmp_path / "out"), resume=True)
    unnamed = collect(tmp_path / "unnamed", "d", made=header(collect={"max_new_tokens": 32}))
    merge([str(unnamed)], str(tmp_path / "same"))
    assert domain_of(TraceSet.open(tmp_path / "same")).hardware is None


def test_a_writer_on_another_machine_is_told_of_merging(tmp_path: Path) -> None:
    collect(tmp_path / "set", "a", made=on("H200"))
    with pytest.raises(TraceMismatchError, match=r"hardware.*traces merge"):
        TraceWriter.open(tmp_path / "set", on("A100"), resume=True)


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_export_has_tokens_only_where_asked(root: Path, tmp_path: Path, format: str) -> None:
    export(TraceSet.open(root), tmp_path / "out", format=format, tokens="drop")
    read = pl.read_csv if format == "csv" else pl.read_parquet
    nodes = read(tmp_path / "out" / f"nodes.{format}")
    assert nodes.height == 8 * 22
    assert "token_id" not in nodes.columns
    export(TraceSet.open(root), tmp_path / "kept", format=format, tokens="keep")
    assert "token_id" in read(tmp_path / "kept" / f"nodes.{format}").columns


# --------------------------------------------------------------------------- damage


def test_damage_costs_its_commit_and_is_told(root: Path) -> None:
    flip(segments(root)[0].path(root))
    with pytest.raises(TraceCorruptError):
        TraceSet.open(root)
    traces = TraceSet.open(root, damaged="skip")
    assert traces.prompt_ids == ("c", "d")
    [damage] = traces.damages
    assert damage.what == segments(root)[0].key
    assert damage.num_rows == 4 * 23
    assert traces.summary()["num_rounds"] == 4


@pytest.mark.parametrize("damage", ["cut", "link"])
def test_damaged_record_costs_its_commit_alone(root: Path, damage: str) -> None:
    path = sorted((root / "commits").glob("*/*.json"))[2]
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:40])
    else:
        path.rename(root / "elsewhere")
        path.symlink_to(root / "elsewhere")
    with pytest.raises(TraceCorruptError, match=path.name):
        TraceSet.open(root)
    traces = TraceSet.open(root, damaged="skip")
    assert traces.prompt_ids == ("a", "b", "d")
    assert path.name in traces.damages[0].what


def test_quarantine_is_told_until_the_file_is_back(root: Path) -> None:
    path = segments(root)[2].path(root)
    whole = path.read_bytes()
    flip(path)
    found = verify(root, quarantine=True)
    assert (found.num_quarantined, found.num_missing_rows) == (1, 2 * 23)
    assert path.name in found.damages[0].reason
    path.write_bytes(whole)
    with pytest.raises(TraceCorruptError, match="1 of 3 in quarantine, 46 rows"):
        TraceSet.open(root, verify=False)
    taken = take_snapshot(open_log(root, damaged="skip"))
    assert taken.num_missing_rows == 46
    assert TraceSet.open(taken.reference).prompt_ids == ("a", "b", "d")
    assert verify(root, quarantine=True).is_whole
    assert TraceSet.open(root).prompt_ids == tuple("abcd")


# --------------------------------------------------------------------------- the command line


def test_verbs_speak(root: Path, tmp_path: Path) -> None:
    name = str(root)
    passes("traces", "verify", name)
    taken = json.loads(passes("traces", "snapshot", name, "--json").out)
    assert json.loads(passes("traces", "snapshot", name, "--list", "--json").out) == [
        taken["digest"]
    ]
    assert "3 commits are 1 now" in passes("traces", "compact", name, "--prune").out
    assert "4 prompts written" in passes("traces", "merge", name, "-o", str(tmp_path / "m")).out
    passes("traces", "export", taken["reference"], "-o", str(tmp_path / "plain"))
    flip(segments(root)[0].path(root))
    outcome = specctl("traces", "verify", name, "--quarantine", "--json")
    assert outcome.code == 4
    assert json.loads(outcome.out)["num_quarantined"] == 1
    assert specctl("traces", "snapshot", name).code == 4
    spared = passes("traces", "snapshot", name, "--without-damaged").out
    assert "rows are missing" not in spared  # what was joined is young, and there
    for path in (root / "data").iterdir():
        path.unlink()
    assert "rows are missing" in passes("traces", "snapshot", name, "--without-damaged").out
