"""Trace sets: what a reader finds, refuses and counts once; snapshots, verifying."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.collect import trace_writer
from specctl.collect.trace_writer import TraceWriter, check_place, write_parquet
from specctl.collect.verifying import take_snapshot, verify
from specctl.errors import (
    InvariantError,
    OutputError,
    StoreError,
    TraceCorruptError,
    TraceError,
    TraceMismatchError,
    TraceSchemaError,
    UsageError,
)
from specctl.logs.trace_files import RECORD_KEY, open_place
from specctl.logs.trace_set import TraceSet, count_once, list_snapshots, read_listing
from specctl.policy import Chain, Policy
from specctl.records import canonical_json
from specctl.trace import TABLES
from tests.cli.command import passes, refuses, specctl
from tests.collect.rounds import DIGEST, header
from tests.collect.sets import (
    NUM_NODES,
    NUM_ROUNDS,
    again,
    collect,
    equal,
    files_of,
    flip,
    honest,
    rows,
    tables_of,
    writer,
)
from tests.stores.memory import MemoryStore

__all__ = ["writer"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two segments: prompts a and b, and c."""
    return collect(tmp_path / "traces", "ab", "c")


# --------------------------------------------------------------------------- a set as it is


def test_summary_counts(root: Path) -> None:
    again(root, "b")
    told = TraceSet.open(root).summary()
    counted = {"segments": 3, "prompts": 3, "repeats": 1, "requests": 3}
    counted |= {"rounds": 3 * NUM_ROUNDS, "nodes": 3 * NUM_NODES}
    assert told.items() >= {f"num_{name}": value for name, value in counted.items()}.items()
    assert told["size_bytes"] == sum(path.stat().st_size for path in root.rglob("*.parquet"))


def test_the_files_state_units_and_meanings(root: Path) -> None:
    """For readers that have no page of ours at hand, such as duckdb."""
    for table, columns in TABLES.items():
        file, *_ = (root / table).glob("*.parquet")
        schema = pq.read_schema(file)
        for column in columns:
            found = schema.field(column.name).metadata
            assert found[b"unit"].decode() == column.unit
            assert found[b"meaning"].decode() == column.meaning


def test_a_prompt_without_rounds_is_finished_all_the_same(writer: TraceWriter) -> None:
    writer.commit(["empty"], {})
    traces = TraceSet.open(writer.place.name)
    assert traces.prompt_ids == ("empty",)
    assert [traces.scan(table).collect().shape for table in TABLES] == [
        (0, len(TABLES[table])) for table in TABLES
    ]
    assert traces.segment_files == []


def test_a_nodes_file_that_no_rounds_file_names_is_not_part_of_the_set(root: Path) -> None:
    before = rows(root)
    write_parquet(root / "nodes" / f"{'0' * 64}.parquet", "nodes", tables_of("x")["nodes"])
    assert equal(rows(root), before)
    found = verify(root)
    assert found.is_whole
    assert found.num_orphans == 1


# --------------------------------------------------------------------------- repeats


def test_a_prompt_that_two_writers_finished_counts_where_it_was_first(root: Path) -> None:
    before, first = rows(root), TraceSet.open(root)
    for prompts in ("b", "bc"):
        again(root, *prompts, rounds=1)
    assert equal(rows(root), before)
    assert [one.repeats for one in read_listing(root).segments] == [set(), set(), {"b"}, {"b", "c"}]
    traces = TraceSet.open(root)
    assert traces.num_rows("nodes") == first.num_rows("nodes")
    assert len(traces.segment_files) == 2
    again(root, "c", "d", rounds=1)
    assert TraceSet.open(root).num_rows("rounds") == first.num_rows("rounds") + 1
    assert verify(root).num_repeats == 4


def test_readers_decide_alike_whatever_the_order_of_the_listing(root: Path) -> None:
    again(root, "a", "c")
    again(root, "b", "d")
    segments = list(read_listing(root).segments)
    for seed in range(5):
        random.Random(seed).shuffle(segments)
        assert count_once(segments) == read_listing(root).segments


def test_a_damaged_first_leaves_the_repeat_to_count(root: Path) -> None:
    again(root, "c")
    damaged = read_listing(root).segments[1]
    flip(root / damaged.key)
    left = TraceSet.open(root, skip_damaged=True)
    assert left.prompt_ids == ("a", "b", "c")
    assert [damage.what for damage in left.damages] == [damaged.key]


# --------------------------------------------------------------------------- writers


def test_a_prompt_is_committed_once(root: Path) -> None:
    """Neither after an earlier writer nor twice in a call."""
    with TraceWriter.open(root, header(), resume=True) as writer:
        for twice in (["a"], ["d", "d"]):
            with pytest.raises(InvariantError, match=f"committed twice, among .'{twice[0]}'"):
                writer.commit(twice, tables_of(twice[0]))
    assert TraceSet.open(root).prompt_ids == ("a", "b", "c")


OTHER_RUNS: dict[str, dict[str, Any]] = {
    "target_digest": {"target_digest": "sha256:" + "cd" * 32},
    "sampling.seed": {"sampling": header().sampling | {"seed": 1}},
    "policy.shape": {"policy": Policy(shape=Chain()).model_dump(mode="json")},
    "collect.max_new_tokens": {"collect": {"max_new_tokens": 33}},
}


@pytest.mark.parametrize("field", OTHER_RUNS)
def test_resume_with_another_run_names_the_field(root: Path, field: str) -> None:
    with pytest.raises(TraceMismatchError, match=f"field {field}.*or another folder"):
        TraceWriter.open(root, header(**OTHER_RUNS[field]), resume=True)


def test_resume_on_another_machine_is_refused(tmp_path: Path) -> None:
    here, far = ({"max_new_tokens": 32, "domain": {"hardware": [name]}} for name in "ab")
    collect(tmp_path / "a", "a", collect=here)
    with pytest.raises(TraceMismatchError, match="collect into another set on this machine"):
        TraceWriter.open(tmp_path / "a", header(collect=far), resume=True)


def test_places_that_are_not_ours_are_refused_untouched(root: Path, tmp_path: Path) -> None:
    """Also at the command line: tests/cli/test_refusals.py."""
    (tmp_path / "file").write_text("mine")
    for place, words, resume in (
        (root, "holds traces already; go on with --resume", False),
        (tmp_path / "file", "is a file", True),
        (root / "rounds" / "deep", "lies in the trace set", True),
    ):
        before = sorted(place.rglob("*")) if place.is_dir() else []
        with pytest.raises(OutputError, match=words):
            check_place(open_place(place), resume=resume)
        with pytest.raises(OutputError, match=words):
            TraceWriter.open(place, header(), resume=resume)
        assert before == (sorted(place.rglob("*")) if place.is_dir() else [])


@pytest.mark.parametrize("left", ["no header", "header"])
def test_a_folder_without_a_finished_prompt_is_started(tmp_path: Path, left: str) -> None:
    """As a killed writer leaves it, or one whose first prompt was refused."""
    (tmp_path / "set" / "tmp").mkdir(parents=True)
    if left == "header":
        TraceWriter.open(tmp_path / "set", header())
    for resume in (False, True):
        check_place(open_place(tmp_path / "set"), resume=resume)
        TraceWriter.open(tmp_path / "set", header(), resume=resume)
    assert TraceSet.open(collect(tmp_path / "set", "a")).prompt_ids == ("a",)


def test_abandoned_files_are_removed_and_those_of_the_living_are_not(root: Path) -> None:
    for name, age_s in (("old", 25 * 3600), ("young", 3600)):
        path = root / "tmp" / name
        path.write_bytes(b"unfinished")
        os.utime(path, times=(path.stat().st_mtime - age_s,) * 2)
    with TraceWriter.open(root, header(), resume=True):
        assert [path.name for path in (root / "tmp").iterdir()] == ["young"]


def test_names_of_a_writer_rise_whatever_its_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(datetime(2026, 1, 31, 12) - timedelta(minutes=n) for n in range(99))

    class Back(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return next(times).replace(tzinfo=tz)

    monkeypatch.setattr(trace_writer, "datetime", Back)
    root = collect(tmp_path / "set", *"abcd")
    assert [one.prompt_ids for one in read_listing(root).segments] == [(p,) for p in "abcd"]


def test_a_writer_of_its_own_prompts_reads_no_earlier_segment(root: Path) -> None:
    """A restarted engine joins a set of any size at once, and one with damage too."""
    [first, *_] = sorted((root / "rounds").iterdir())
    first.write_bytes(b"damage")
    with pytest.raises(TraceCorruptError):
        TraceWriter.open(root, header(), resume=True)
    with TraceWriter.open(root, header(), resume=True, own_prompts=True) as writer:
        writer.commit(["e"], tables_of(["e"]))
    assert "e" in read_listing(root, skip_damaged=True).prompt_ids


class OverwritingStore(MemoryStore):
    """A store that ignores `If-None-Match`."""

    def put_new(self, key: str, data: bytes) -> None:
        self.kept[key] = data


def test_a_bucket_that_overwrites_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.logs.trace_files.open_store", lambda _: OverwritingStore())
    with pytest.raises(StoreError, match="overwrote"):
        TraceWriter.open("s3://bucket/set", header())


# --------------------------------------------------------------------------- refusals of a reader


def test_other_places_are_not_traces(root: Path, tmp_path: Path) -> None:
    for places, error, words in (
        ((tmp_path / "none",), TraceError, "no such folder"),
        ((tmp_path,), TraceError, "it has no trace.json"),
        ((), UsageError, "none are named"),
    ):
        with pytest.raises(error, match=words):
            TraceSet.open(*places)
    with pytest.raises(UsageError, match="'trees'"):
        TraceSet.open(root).scan("trees")


HEADERS: list[tuple[Any, str]] = [
    ({"trace_version": 2}, "trace_version 2; this specctl reads 1"),
    ({"later": 1}, "later"),
    ({"schema_ids": {"rounds": DIGEST}}, "table"),
    ({"collect": {"tokens": {"mode": "x"}}}, "mode"),
    ({"policy_digest": DIGEST}, "collected under"),
    (b'{"trace_version":1 }', "schema_ids: it is missing"),
    *((content, "was altered: ") for content in (b"", b"\xff", b"[" * 99_999)),
]


@pytest.mark.parametrize(("change", "words"), HEADERS)
def test_the_header_is_read_strictly(root: Path, change: Any, words: str) -> None:
    path = root / "trace.json"
    if isinstance(change, dict):
        change = canonical_json(json.loads(path.read_bytes()) | change).encode()
    path.write_bytes(change)
    with pytest.raises(TraceError, match=rf"trace\.json.*{words}"):
        TraceSet.open(root)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": ["a", "a"]},
        {"header_digest": DIGEST},
        *({"nodes": {name: text}} for name, text in (("sha256", "x"), ("key", "../x"))),
        {"nodes": {"size_bytes": 1}},
    ],
)
def test_records_are_read_strictly(root: Path, change: dict[str, Any]) -> None:
    path = files_of(root)["rounds"]
    value = json.loads(pq.read_metadata(path).metadata[RECORD_KEY])
    value |= {"nodes": value["nodes"] | change["nodes"]} if "nodes" in change else change
    rows = pq.ParquetFile(path).read()
    changed = {**rows.schema.metadata, RECORD_KEY: canonical_json(value).encode()}
    pq.write_table(rows.replace_schema_metadata(changed), path)
    honest(path)
    with pytest.raises(TraceError):
        TraceSet.open(root)


def swap_nodes(root: Path) -> None:
    one, two = sorted((root / "nodes").iterdir())
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def link_nodes(root: Path) -> None:
    one, two = sorted((root / "nodes").iterdir())
    one.unlink()
    one.symlink_to(two)


def stray(name: str) -> Callable[[Path], object]:
    return lambda root: (root / "rounds" / name).write_bytes(b"")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no header": (lambda root: (root / "trace.json").unlink(), r"trace\.json.*restore"),
    "name": (stray("x.parquet"), "another name"),
    "short digest": (stray(f"20260101T000000000Z-{'0' * 63}.parquet"), "another name"),
    "no nodes": (lambda root: files_of(root)["nodes"].unlink(), "nodes"),
    "swapped": (swap_nodes, "nodes"),
    "linked": (link_nodes, "a link"),
    "shorter": (lambda root: os.truncate(files_of(root)["nodes"], 99), "has 99 bytes of"),
}


@pytest.mark.parametrize("name", FILES)
def test_altered_files_are_refused_by_readers_and_writers(root: Path, name: str) -> None:
    damage, words = FILES[name]
    damage(root)
    with pytest.raises(TraceCorruptError, match=words):
        TraceSet.open(root)
    if name != "swapped":  # which digests alone show
        with pytest.raises(TraceCorruptError, match=words):
            TraceSet.open(root, verify=False)
        with pytest.raises(TraceCorruptError, match=words):
            TraceWriter.open(root, header(), resume=True)
    assert (root / "trace.json").exists() == (name != "no header"), "no other one is made"


def test_a_file_that_one_may_not_read_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system's refusal is made up."""

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("specctl.logs.segment_files.file_sha256", refuse)
    with pytest.raises(StoreError, match="no permission"):
        TraceSet.open(root, skip_damaged=True)


def test_sets_of_one_pair_are_read_together(root: Path, tmp_path: Path) -> None:
    other = collect(tmp_path / "other", "de", policy=Policy(shape=Chain()).model_dump(mode="json"))
    both = TraceSet.open(root, other)
    assert both.prompt_ids == tuple("abcde")
    assert both.digest == TraceSet.open(other, root).digest != TraceSet.open(root).digest
    assert both.snapshots == (TraceSet.open(root).digest, TraceSet.open(other).digest)


@pytest.mark.parametrize("changes", [OTHER_RUNS["target_digest"], OTHER_RUNS["sampling.seed"]])
def test_sets_of_other_pairs_and_shared_prompts_are_not(
    root: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(TraceMismatchError, match="one pair"):
        TraceSet.open(root, collect(tmp_path / "other", "d", **changes))
    with pytest.raises(TraceMismatchError, match=r"prompt 'c'.*name one of these sets"):
        TraceSet.open(root, collect(tmp_path / "shared", "c"))


def test_the_engine_is_named(tmp_path: Path) -> None:
    engine = {"name": "vllm", "version": "0.32.0", "runner": 1}
    root = collect(tmp_path / "set", "a", collect={"engine": engine, "max_new_tokens": 32})
    assert "vllm 0.32.0" in passes("show", root).out
    changed = json.loads((root / "trace.json").read_bytes())
    changed["collect"]["engine"] = {"name": "vllm"}
    (root / "trace.json").write_bytes(canonical_json(changed).encode())
    with pytest.raises(TraceSchemaError, match=r"engine\.version"):
        TraceSet.open(root)


# --------------------------------------------------------------------------- snapshots


def test_a_snapshot_is_what_was_there_and_stays_it(root: Path) -> None:
    taken = take_snapshot(read_listing(root))
    assert taken == take_snapshot(read_listing(root))
    assert (taken.digest, taken.num_prompts) == (TraceSet.open(root).digest, 3)
    before = rows(root)
    collect(root, "d")
    again(root, "a")
    assert equal(rows(taken.reference), before)
    assert TraceSet.open(taken.reference).digest == taken.digest != TraceSet.open(root).digest
    assert list_snapshots(open_place(root)) == [taken.digest]
    newest = max((root / "rounds").iterdir())
    flip(newest)
    assert equal(rows(taken.reference), before), "damage beside a snapshot does not matter"
    assert specctl("traces", "verify", root).code == 4
    passes("traces", "verify", taken.reference)


def test_a_set_is_read_from_a_time_on(root: Path) -> None:
    """Of a set that a server writes for months, the recent part; by the names of its segments."""
    for path, day in zip(sorted((root / "rounds").iterdir()), ("0130", "0131"), strict=True):
        path.rename(path.with_name(f"2026{day}T120000000Z-{path.name.rpartition('-')[2]}"))
    for time, prompts in {
        "2026-01-30": ("a", "b", "c"),
        "2026-01-30T12:00:01": ("c",),
        "2026-01-31 12:00": ("c",),
        "2026-02-01": (),
    }.items():
        found = TraceSet.open(f"{root}@{time}")
        assert found.prompt_ids == prompts, time
        assert found.digest == TraceSet.open(f"{root}@{time}").digest


def test_a_snapshot_that_is_not_there_or_lost_a_segment_is_refused(root: Path) -> None:
    with pytest.raises(TraceError, match="--list"):
        TraceSet.open(f"{root}@sha256:{'0' * 64}")
    taken = take_snapshot(read_listing(root))
    lost = min((root / "rounds").iterdir())
    lost.unlink()
    assert TraceSet.open(root).prompt_ids == ("c",), "nothing else tells that it was there"
    with pytest.raises(TraceCorruptError, match=lost.name):
        TraceSet.open(taken.reference)
    assert lost.name in verify(root).damages[0].reason


def test_snapshots_of_damage_say_what_is_missing(root: Path) -> None:
    path = files_of(root)["nodes"]
    flip(path)
    assert path.name in refuses(4, "traces", "snapshot", root)
    assert not list(root.glob("snapshots/*"))
    found = passes("traces", "snapshot", root, "--skip-damaged").out
    assert f"missing: {2 * (NUM_ROUNDS + NUM_NODES)} rows" in found
    told = json.loads(passes("traces", "snapshot", root, "--skip-damaged", "--json").out)
    assert [told["num_prompts"], len(told["damages"])] == [1, 1]
    assert TraceSet.open(told["reference"]).prompt_ids == ("c",)


def test_snapshots_are_listed(root: Path, tmp_path: Path) -> None:
    assert passes("traces", "snapshot", root, "--list").out == "no snapshots\n"
    assert passes("traces", "snapshot", root, "--list", "--json").out == "[]\n"
    assert passes("traces", "snapshot", root).out.startswith("2 segments of 3 prompts:\n")
    assert "sha256:" in passes("traces", "snapshot", root, "--list").out
    assert "no such folder" in refuses(4, "traces", "snapshot", tmp_path / "none", "--list")


# --------------------------------------------------------------------------- verify


def test_verify_names_everything_that_is_damaged(root: Path) -> None:
    collect(root, "d")
    listing = read_listing(root)
    flip(root / listing.segments[0].key)
    nodes = listing.segments[1].record.nodes
    assert nodes is not None
    (root / nodes.key).unlink()
    told = json.loads(specctl("traces", "verify", root, "--json").out)
    assert not told["is_whole"]
    assert [one["what"] for one in told["damages"]] == [one.key for one in listing.segments[:2]]
    line = specctl("traces", "verify", root).out
    assert "1 segment of 1 prompt" in line
    assert nodes.key in line


def test_one_request_in_two_segments_is_damage(tmp_path: Path) -> None:
    """Each file is sound, and so is its record."""
    made = tables_of("a")
    index = made["rounds"].schema.get_field_index("prompt_id")
    field = made["rounds"].schema.field(index)
    names = pa.array(["b"] * NUM_ROUNDS).dictionary_encode()
    renamed = {**made, "rounds": made["rounds"].set_column(index, field, names)}
    with TraceWriter.open(tmp_path / "set", header()) as opened:
        opened.commit(["a"], made)
        opened.commit(["b"], renamed)
    with pytest.raises(TraceCorruptError, match="two segments hold rounds of request 'a/0'"):
        TraceSet.open(tmp_path / "set")
    [damage] = verify(tmp_path / "set").damages
    assert "two segments hold" in damage.reason


# --------------------------------------------------------------------------- in a bucket


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_cache")
def test_a_bucket_holds_what_a_folder_would(s3_url: str, root: Path) -> None:
    collect(s3_url, "ab", "c")
    assert equal(rows(s3_url), rows(root))
    with pytest.raises(OutputError, match="--resume"):
        TraceWriter.open(s3_url, header())
    taken, before = take_snapshot(read_listing(s3_url)), rows(s3_url)
    again(s3_url, "a", rounds=1)
    assert equal(rows(taken.reference), before)
    with pytest.raises(TraceError, match=r"trace\.json"):
        TraceSet.open(f"{s3_url}-none")


@pytest.mark.usefixtures("_cache")
def test_copies_are_checked_on_their_way_and_at_home(s3_url: str, tmp_path: Path) -> None:
    collect(s3_url, "a")
    copies = tmp_path / "cache" / "specctl" / "segments"
    [segment] = read_listing(s3_url).segments
    assert copies.stat().st_mode & 0o777 == 0o700
    for copy in copies.iterdir():
        assert copy.stat().st_mode & 0o777 == 0o600
        copy.write_bytes(b"rotten")
    (copies / "tmp-old").write_bytes(b"unfinished")
    os.utime(copies / "tmp-old", times=(0, 0))
    TraceSet.open(s3_url)  # fetched again
    assert not (copies / "tmp-old").exists()
    assert verify(s3_url).is_whole
    nodes = segment.record.nodes
    assert nodes is not None
    client = open_place(s3_url).store._store  # type: ignore[attr-defined]
    obstore.put(client, nodes.key, b"other bytes")  # as no store of specctl can
    TraceSet.open(s3_url)  # the copy still holds the bytes that were published
    assert nodes.key in verify(s3_url).damages[0].reason
    for copy in copies.iterdir():
        copy.unlink()
    with pytest.raises(TraceCorruptError, match=nodes.key):
        TraceSet.open(s3_url)
    open_place(s3_url).store.put_new("rounds/stray", b"of another tool")
    assert [one.what for one in TraceSet.open(s3_url, skip_damaged=True).damages] == [
        "rounds/stray",
        segment.key,
    ]
