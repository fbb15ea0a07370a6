"""Prompts whose rows span segments: they are read whole, or not at all."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from specctl.collect import trace_writer
from specctl.collect.rewriting import rewrite, take_snapshot
from specctl.collect.trace_writer import TraceWriter
from specctl.collect.verifying import verify
from specctl.errors import InvariantError, TraceCorruptError, TraceMismatchError, TraceSchemaError
from specctl.logs import trace_set, whole_prompts
from specctl.logs.parquet import join_tables
from specctl.logs.trace_files import Place, Segment
from specctl.logs.trace_set import TraceSet, read_listing
from specctl.logs.tree_log import LiveLog, join_chunks, open_log
from specctl.logs.whole_prompts import count_once
from specctl.records import canonical_json
from specctl.trace import TABLES
from tests.artifacts.examples import write_artifact
from tests.cli.command import passes, refuses, specctl
from tests.collect.faults import (
    check_set,
    fail_everywhere,
    in_pieces,
    simulated_life,
    survive_power_loss,
)
from tests.collect.rounds import header
from tests.collect.sets import collect, equal, flip, piece, rows, tables_of
from tests.collect.shim import Mode
from tests.replay.logs import random_traces

ROUNDS = 6
"""Of each prompt here."""


def spread(root: Path, *segments: dict[str, tuple[int, int]], rounds: int = ROUNDS) -> Path:
    """One writer's segments: of each prompt, the first round and the one behind the last.

    Rows stand step by step, as an engine has them, not prompt by prompt.
    """
    with TraceWriter.open(root, header(), resume=True) as writer:
        for segment in segments:
            steps = [
                piece(prompt, step, step + 1, rounds)
                for step in range(rounds)
                for prompt, (first, stop) in segment.items()
                if first <= step < stop
            ]
            done = [prompt for prompt, (_, stop) in segment.items() if stop == rounds]
            writer.commit(done, join_tables(steps), open_ids=segment.keys() - done)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Prompts a and b are finished and span two and three segments, c fits one, d is open."""
    return spread(
        tmp_path / "spanning",
        {"a": (0, 2), "b": (0, 3)},
        {"b": (3, 5), "a": (2, 6), "c": (0, 6)},
        {"d": (0, 2), "b": (5, 6)},
        {"d": (2, 4)},
    )


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The same finished prompts, each in one segment."""
    with TraceWriter.open(tmp_path / "plain", header()) as writer:
        for prompt in "acb":
            writer.commit([prompt], tables_of([prompt], ROUNDS))
    return tmp_path / "plain"


def plain_rows(prompts: str, rounds: int = ROUNDS) -> dict[str, pl.DataFrame]:
    texts = pl.col(pl.Categorical).cast(pl.String)
    made = tables_of(["", *sorted(prompts)], rounds)
    return {
        table: pl.DataFrame(made[table]).with_columns(texts).filter(pl.col("request_id") != "/0")
        for table in TABLES
    }


# --------------------------------------------------------------------------- reading


def test_a_time_amid_prompts_is_refused(root: Path) -> None:
    """Their first rounds are missing then, and what is left is no sample of any."""
    for day, path in enumerate(sorted((root / "rounds").iterdir()), 1):
        path.rename(path.with_name(f"2026010{day}T120000000Z-{path.name.rpartition('-')[2]}"))
    assert TraceSet.open(f"{root}@2026-01-01").prompt_ids == ("a", "b", "c")
    with pytest.raises(TraceMismatchError, match=r"began before; read .* as a whole"):
        TraceSet.open(f"{root}@2026-01-02")


def test_records_say_what_goes_on_and_what_came_before(root: Path) -> None:
    records = [one.record for one in read_listing(root).segments]
    assert [one.prompt_ids for one in records] == [[], ["a", "c"], ["b"], []]
    assert [one.open_ids for one in records] == [["a", "b"], ["b"], ["d"], ["d"]]
    assert [one.num_earlier for one in records] == [{}, {"a": 1, "b": 1}, {"b": 2}, {"d": 1}]


def test_finished_prompts_are_read_whole_and_others_are_counted(root: Path, plain: Path) -> None:
    assert equal(rows(root), rows(plain))
    traces = TraceSet.open(root)
    assert traces.prompt_ids == ("a", "b", "c")
    assert [traces.num_rows(table) for table in TABLES] == [18, 18 * 22]
    assert traces.summary()["num_unfinished"] == 1
    one, two = (
        join_chunks(list(LiveLog(tuple(TraceSet.open(path).segment_files())).chunks()))
        for path in (root, plain)
    )
    assert one.positions.prompt_ids == two.positions.prompt_ids
    for name in ("root", "on_path", "known", "draft_logp", "entropy", "first_child"):
        assert getattr(one, name).equal(getattr(two, name))


def test_rows_of_a_request_stand_together_in_order(root: Path) -> None:
    frames = {table: TraceSet.open(root).scan(table).collect() for table in TABLES}
    assert frames["rounds"]["round_idx"].to_list() == [*range(ROUNDS)] * 3
    assert frames["rounds"]["request_id"].rle().len() == 3
    assert frames["nodes"]["node_idx"].to_list() == [*range(22)] * 3 * ROUNDS


def test_unfinished_prompts_are_read_where_they_are_wanted(root: Path, plain: Path) -> None:
    every = TraceSet.open(root, unfinished=True)
    assert every.prompt_ids == ("a", "b", "c", "d")
    counts = every.scan("rounds").group_by(pl.col("prompt_id").cast(pl.String)).len().collect()
    assert dict(counts.iter_rows()) == {"a": 6, "b": 6, "c": 6, "d": 4}
    assert every.digest != TraceSet.open(root).digest, "other rows"
    assert TraceSet.open(plain, unfinished=True).num_rows("rounds") == 18


def test_a_request_may_end_without_further_rows(tmp_path: Path) -> None:
    with TraceWriter.open(tmp_path / "set", header()) as writer:
        writer.commit([], tables_of(["a"]), open_ids=["a"])
        segment = writer.commit(["a"], {})
    assert segment.record.num_earlier == {"a": 1}
    assert equal(rows(tmp_path / "set"), plain_rows("a", 2))


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_of_several_writers_reads_as_the_plain_set(tmp_path: Path, seed: int) -> None:
    draw, root = random.Random(seed), tmp_path / "set"
    open_at: dict[str, int] = {}
    for writer in range(2):
        names, segments = [f"{writer}-{number}" for number in range(5)], []
        done, running = dict.fromkeys(names, 0), list[str]()
        while any(at < ROUNDS for at in done.values()) and len(segments) < 8:
            running += [names[len(running)]] if len(running) < len(names) else []
            segment = {}
            for name in running:
                stop = min(ROUNDS, done[name] + draw.randrange(4))
                if stop > done[name]:
                    segment[name] = (done[name], stop)
                done[name] = stop
            segments.append(segment)
        spread(root, *segments)
        open_at |= {name: at for name, at in done.items() if 0 < at < ROUNDS}
        finished = sorted(name for name, at in done.items() if at == ROUNDS)
        assert [p for p in TraceSet.open(root).prompt_ids if p[0] == str(writer)] == finished
    traces = TraceSet.open(root)
    made = tables_of(traces.prompt_ids, ROUNDS)
    texts = pl.col(pl.Categorical).cast(pl.String)
    want = {table: pl.DataFrame(made[table]).with_columns(texts) for table in TABLES}
    assert equal(rows(root), want)
    assert read_listing(root).unfinished_ids == tuple(sorted(open_at))


def test_a_dense_log_in_pieces_is_the_same_log(tmp_path: Path) -> None:
    whole = random_traces(tmp_path / "whole", num_prompts=2, depth=3, top_k=2)
    [part] = whole.parts
    with TraceWriter.open(tmp_path / "pieces", part.header) as writer:
        for segment in part.segments:
            every, starts = part.tables(segment), [0, 40, 41, 100]
            for first, stop in zip(starts, [*starts[1:], 128], strict=True):
                cut = {
                    name: table.filter(
                        [first <= idx < stop for idx in table["round_idx"].to_pylist()]
                    )
                    for name, table in every.items()
                }
                names = segment.record.prompt_ids
                done, going_on = (names, []) if stop == 128 else ([], names)
                writer.commit(done, cut, open_ids=going_on)
    cut_log = join_chunks(list(open_log(TraceSet.open(tmp_path / "pieces")).chunks()))
    log = join_chunks(list(open_log(whole).chunks()))
    assert cut_log.positions.start.tolist() == log.positions.start.tolist() != [0]
    assert cut_log.draft_logp.equal(log.draft_logp)
    assert cut_log.on_path.equal(log.on_path)
    assert (cut_log.positions.remaining == log.positions.remaining).all()


# --------------------------------------------------------------------------- writing


def test_a_writer_takes_no_open_prompt_of_another_nor_a_finished_one(root: Path) -> None:
    with TraceWriter.open(root, header(), resume=True) as writer:
        for names, open_ids in (([], ["d"]), ([], ["a"]), (["e"], ["e"]), ([], ["e", "e"])):
            with pytest.raises(InvariantError, match="left open by another writer"):
                writer.commit(names, {}, open_ids=open_ids)
        writer.commit(["d"], tables_of(["d"], ROUNDS))  # decoded again, whole
    assert equal(rows(root), plain_rows("abcd"))
    assert read_listing(root).unfinished_ids == ()


def test_names_of_a_writer_rise_whatever_its_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(datetime(2026, 1, 31, 12) - timedelta(minutes=n) for n in range(99))

    class Back(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return next(times).replace(tzinfo=tz)

    monkeypatch.setattr(trace_writer, "datetime", Back)
    root = spread(tmp_path / "set", *({"a": (step, step + 1)} for step in range(ROUNDS)))
    assert equal(rows(root), plain_rows("a"))


# --------------------------------------------------------------------------- verbs


def test_verbs_count_unfinished_prompts(root: Path, tmp_path: Path) -> None:
    assert "1 unfinished prompt" in passes("traces", "verify", root).out
    assert "1 unfinished prompt" in passes("traces", "snapshot", root).out
    for options, num_rounds in (((), 18), (("--unfinished",), 22)):
        told = json.loads(passes("show", root, "--json", *options).out)["summary"]
        assert [told["num_rounds"], told["num_unfinished"]] == [num_rounds, 1]
        out = tmp_path / f"out-{num_rounds}"
        passes("traces", "export", root, "-o", out, *options)
        assert len(pl.read_parquet(out / "rounds.parquet")) == num_rounds
    assert (
        "1 unfinished prompt left out"
        in passes(*("traces", "resegment", root, "-o", tmp_path / "new")).out
    )
    artifact = write_artifact(tmp_path / "artifact")
    assert "expected a trace set" in refuses(2, "show", artifact, "--unfinished")


def test_the_engine_is_named(tmp_path: Path) -> None:
    engine = {"name": "vllm", "version": "0.32.0", "runner": 1}
    root = collect(tmp_path / "set", "a", collect={"engine": engine, "max_new_tokens": 32})
    assert "vllm 0.32.0" in passes("show", root).out
    changed = json.loads((root / "trace.json").read_bytes())
    changed["collect"]["engine"] = {"name": "vllm"}
    (root / "trace.json").write_bytes(canonical_json(changed).encode())
    with pytest.raises(TraceSchemaError, match=r"engine\.version"):
        TraceSet.open(root)


def test_new_sets_hold_whole_prompts(root: Path, plain: Path, tmp_path: Path) -> None:
    taken = take_snapshot(read_listing(root))
    spread(root, {"e": (0, 5)}, {"e": (5, 6)})
    for number, segment_rows in enumerate((1, 10**6)):
        out = str(tmp_path / f"out-{number}")
        done = rewrite([str(root)], out, segment_rows=segment_rows)
        assert (done.num_prompts, done.num_unfinished) == (4, 1)
        records = [one.record for one in read_listing(out).segments]
        assert not any(one.open_ids or one.num_earlier for one in records)
        assert equal(rows(out), rows(root))
    merged = rewrite([taken.reference, str(root), str(plain)], str(tmp_path / "merged"))
    assert (merged.num_prompts, merged.num_repeats, merged.num_unfinished) == (4, 6, 1)
    assert equal(rows(tmp_path / "merged"), rows(root))
    assert equal(rows(taken.reference), rows(plain))
    spread(root, {"f": (0, 6)})
    assert rewrite([str(root)], str(tmp_path / "out-0"), resume=True).num_prompts == 1


def test_sets_of_two_machines_are_merged(tmp_path: Path) -> None:
    def on(machine: str) -> dict[str, Any]:
        engine = {"name": "vllm", "version": "0.32.0"}
        return {"collect": {"engine": engine, "domain": {"hardware": [machine]}}}

    for name in "ab":
        with TraceWriter.open(tmp_path / name, header(**on(name))) as writer:
            writer.commit([], piece(name, 0, 1), open_ids=[name])
            writer.commit([name], piece(name, 1, 2))
    rewrite([str(tmp_path / name) for name in "ab"], str(tmp_path / "out"))
    traces = TraceSet.open(tmp_path / "out")
    assert traces.header.collect == on("a")["collect"] | {"domain": {"hardware": ["a", "b"]}}
    assert equal(rows(tmp_path / "out"), plain_rows("ab", 2))


# --------------------------------------------------------------------------- faults


@pytest.mark.parametrize("mode", ["simulated death", "ENOSPC"])
def test_death_at_any_operation_leaves_whole_prompts(tmp_path: Path, mode: Mode) -> None:
    life = functools.partial(simulated_life, mode=mode, publish=in_pieces)
    assert fail_everywhere(tmp_path, lambda root, at: life(root, at=at), 5) > 90


def test_power_loss_leaves_whole_prompts(tmp_path: Path) -> None:
    assert survive_power_loss(tmp_path, publish=in_pieces) > 10


def key_of(root: Path, number: int) -> Path:
    return root / read_listing(root).segments[number].key


@pytest.mark.parametrize(
    ("number", "words", "left"),
    [
        (0, r"prompt 'a' \(and 1 more prompt\).* 1 earlier .*found 0.*restore", "c"),
        (1, r"prompt 'b'.* 2 earlier .*found 1.*restore", ""),
    ],
)
def test_a_missing_piece_is_named_and_its_prompts_are_not_whole(
    root: Path, tmp_path: Path, number: int, words: str, left: str
) -> None:
    behind = key_of(root, number + 1).name
    key_of(root, number).unlink()
    for verify_files in (True, False):
        with pytest.raises(TraceCorruptError, match=rf"{behind}.*{words}"):
            TraceSet.open(root, verify=verify_files)
    with pytest.raises(TraceCorruptError, match=words):
        rewrite([str(root)], str(tmp_path / "none"))
    [damage] = verify(root).damages
    assert behind in damage.what
    traces = TraceSet.open(root, skip_damaged=True)
    assert "".join(traces.prompt_ids) == left
    assert equal(rows_skipping(root), plain_rows(left))
    assert [one.what for one in traces.damages] == [damage.what]
    assert "an unknown number" in passes("traces", "snapshot", root, "--skip-damaged").out
    rewrite([str(root)], str(tmp_path / "out"), skip_damaged=True)
    assert "".join(TraceSet.open(tmp_path / "out").prompt_ids) == left
    every = TraceSet.open(root, skip_damaged=True, unfinished=True)
    ends_there = {0: set[str](), 1: {"a"}}[number]
    assert set(every.prompt_ids) == {*left, "d", *ends_there}


def rows_skipping(root: Path) -> dict[str, pl.DataFrame]:
    texts = pl.col(pl.Categorical).cast(pl.String)
    traces = TraceSet.open(root, skip_damaged=True)
    return {table: traces.scan(table).with_columns(texts).collect() for table in TABLES}


@pytest.mark.parametrize("damage", ["flipped", "no nodes"])
def test_a_damaged_piece_is_refused_by_name(root: Path, damage: str) -> None:
    segment = read_listing(root).segments[0]
    path = root / segment.key
    if damage == "no nodes":
        assert segment.record.nodes is not None
        path = root / segment.record.nodes.key
        path.unlink()
    else:
        flip(path)
    with pytest.raises(TraceCorruptError, match=path.name):
        TraceSet.open(root)
    traces = TraceSet.open(root, skip_damaged=True)
    assert traces.prompt_ids == ("c",)
    assert len(traces.damages) == 2, "the file, and the prompts that lack its rows"


def test_a_prompt_without_its_last_piece_is_unfinished(root: Path) -> None:
    key_of(root, 2).unlink()
    with pytest.raises(TraceCorruptError, match="prompt 'd'"):
        TraceSet.open(root)  # d begins there
    key_of_last = max((root / "rounds").iterdir())
    key_of_last.unlink()
    traces = TraceSet.open(root)
    assert traces.prompt_ids == ("a", "c")
    assert traces.parts[0].unfinished_ids == ("b",)
    assert verify(root).is_whole


def test_rows_that_no_writer_makes_are_named_in_pieces_too(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with TraceWriter.open(root, header()) as writer:
        first = writer.commit([], join_tables([piece("a", 0, 1), piece("x", 0, 1)]), open_ids=["a"])
        last = writer.commit(["a"], piece("a", 1, 2))
    with pytest.raises(TraceCorruptError, match="prompt 'x'"):
        TraceSet.open(root)
    found = [damage.what for damage in verify(root).damages]
    assert found == [first.key, last.key]


def test_a_segment_that_the_listing_missed_is_no_damage(
    root: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may give a file that was made while it was listed, and not the one made before."""
    real, seen = Place.keys, list[list[str]]()

    def keys(place: Place, prefix: str) -> list[str]:
        found = real(place, prefix)
        if prefix == "rounds":
            seen.append(found)
            return found[:1] + found[2:] if len(seen) == 1 else found
        return found

    monkeypatch.setattr(Place, "keys", keys)
    assert equal(rows(root), rows(plain))
    assert len(seen) > 2


def two_of_one_id(root: Path, *actions: tuple[int, str]) -> Path:
    """Two writers that know nothing of each other: who acts, and with which part of prompt a."""
    both = [TraceWriter.open(root, header(), resume=True) for _ in range(2)]
    parts: dict[str, Callable[[TraceWriter], Segment]] = {
        "first": lambda one: one.commit([], piece("a", 0, 1), open_ids=["a"]),
        "last": lambda one: one.commit(["a"], piece("a", 1, 2)),
        "whole": lambda one: one.commit(["a"], tables_of(["a"])),
    }
    for writer, part in actions:
        parts[part](both[writer])
    return root


def test_open_rows_of_two_writers_are_refused_by_name(tmp_path: Path) -> None:
    root = two_of_one_id(tmp_path / "set", (0, "first"), (1, "first"), (0, "last"), (1, "last"))
    with pytest.raises(
        TraceCorruptError, match=r"prompt 'a'.* 0 earlier .*found 1.*ids of their own"
    ):
        TraceSet.open(root, verify=False)
    assert TraceSet.open(root, skip_damaged=True).prompt_ids == ()
    with TraceWriter.open(collect(tmp_path / "other", "b"), header(), resume=True) as writer:
        assert writer.pending(["a"]) == ["a"]


@pytest.mark.parametrize(
    "actions",
    [
        ((0, "first"), (1, "whole"), (0, "last")),
        ((0, "first"), (0, "last"), (1, "whole")),
        ((0, "first"), (0, "last"), (1, "first"), (1, "last")),
        ((0, "whole"), (1, "first"), (1, "last")),
    ],
)
def test_a_prompt_that_two_writers_finish_counts_once(
    tmp_path: Path, actions: tuple[tuple[int, str], ...]
) -> None:
    root = two_of_one_id(tmp_path / "set", *actions)
    assert equal(rows(root), plain_rows("a", 2))
    listing = read_listing(root)
    assert (listing.num_repeats, listing.unfinished_ids) == (1, ())
    segments = list(listing.segments)
    random.Random(0).shuffle(segments)
    assert count_once(segments) == listing.segments
    assert specctl("traces", "verify", root).code == 0


# --------------------------------------------------------------------------- mutants


def drop_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that forgets the rows of earlier segments."""
    monkeypatch.setattr(whole_prompts, "keep_prompts", lambda *_: {})


def count_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes every prompt with rows for a whole one."""
    monkeypatch.setattr(
        Segment, "prompt_ids", property(lambda one: (*one.record.prompt_ids, *one.record.open_ids))
    )


def believe_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not look whether all pieces are there."""
    real = trace_set.count_once

    def marked(segments: Any) -> Any:
        found = real(segments)
        for one in found:
            object.__setattr__(one, "broken", frozenset())
        return found

    monkeypatch.setattr(trace_set, "count_once", marked)


def finished_and_open(root: Path) -> Path:
    with TraceWriter.open(root, header()) as writer:
        in_pieces(writer, "ab", lambda _: None)
        writer.commit([], piece("c", 0, 1), open_ids=["c"])
    return root


def without_a_piece(root: Path) -> Path:
    with TraceWriter.open(root, header()) as writer:
        in_pieces(writer, "ab", lambda _: None)
    key_of(root, 0).unlink()
    return root


@pytest.mark.parametrize(
    ("mutant", "make"),
    [
        (drop_earlier, finished_and_open),
        (count_unfinished, finished_and_open),
        (believe_any_number, without_a_piece),
    ],
)
def test_mutants_are_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
    make: Callable[[Path], Path],
) -> None:
    root = make(tmp_path / "set")
    if make is finished_and_open:
        check_set(root, {"a", "b"}, {"a", "b"})
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_set(root, set(), {"a", "b"})


def test_a_writer_of_its_own_prompts_reads_no_earlier_segment(root: Path) -> None:
    """A restarted engine joins a set of any size at once, and one with damage too."""
    [first, *_] = sorted((root / "rounds").iterdir())
    first.write_bytes(b"damage")
    with pytest.raises(TraceCorruptError):
        TraceWriter.open(root, header(), resume=True)
    with TraceWriter.open(root, header(), resume=True, own_prompts=True) as writer:
        writer.commit(["e"], tables_of(["e"], ROUNDS))
    kept = read_listing(str(root), skip_damaged=True)
    assert "e" in kept.prompt_ids
