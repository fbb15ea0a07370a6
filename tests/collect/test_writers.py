"""Many writers of one set: nobody waits, nothing is overwritten, a writer has one holder."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from specctl.collect.commits import Commit
from specctl.collect.logs import read_commits
from specctl.collect.reader import TraceSet
from specctl.collect.shards import Shard
from specctl.collect.store import TraceWriter
from specctl.collect.writer_log import RETIRED, WriterFencedError, WriterLog
from specctl.errors import (
    OutputError,
    SpecctlError,
    StoreError,
    TraceCorruptError,
    TraceMismatchError,
    UsageError,
)
from specctl.stores import probe
from tests.collect.memory_store import FaultyStore, OverwritingStore, SetStore, StaleStore
from tests.collect.rounds import header
from tests.collect.sets import rows_of
from tests.collect.takeovers import NAME, begun, take, tell_all, tell_all_counts

# --------------------------------------------------------------------------- fencing


@pytest.mark.parametrize(("num_commits", "num_resumes", "at_least"), [(2, 1, 15), (0, 2, 60)])
def test_every_interleaving_of_resumes_leaves_one_holder(
    num_commits: int, num_resumes: int, at_least: int
) -> None:
    """An old holder that commits, beside processes that take its writer over.

    scripts/inject_faults.py runs both together.
    """
    told = tell_all(num_commits, num_resumes)
    assert told.num_runs >= at_least
    assert told.num_takeovers >= told.num_runs
    if num_commits:
        assert told.num_fenced > told.num_runs / 4, "the old holder is seldom fenced"


def test_mutant_without_the_fence_in_the_log_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that takes the next free slot, whoever has the one before."""

    def append(self: WriterLog, files: object, prompt_ids: list[str]) -> Commit:
        while True:
            try:
                return real(self, files, prompt_ids)  # type: ignore[arg-type]
            except WriterFencedError:
                self._last = self._last.model_copy(update={"seq": self._last.seq + 1})

    real = WriterLog.append
    monkeypatch.setattr(WriterLog, "append", append)
    with pytest.raises((TraceCorruptError, AssertionError)):
        tell_all(2, 1)


def test_fenced_writer_says_who_and_stops(tmp_path: Path) -> None:
    with TraceWriter.open(tmp_path, header()) as old:
        old.commit(["a"], rows_of("a"))
        take(old.place)  # as another machine would, which does not see our lock
        with pytest.raises(WriterFencedError, match=r"'shard 1/1'.*epoch 1 .*found epoch 2"):
            old.commit(["b"], rows_of("b"))
        with pytest.raises(OutputError, match="an earlier commit that failed"):
            old.commit(["c"], rows_of("c"))
    assert TraceSet.open(tmp_path).prompt_ids == ("a",)


class Interrupted(SetStore):
    """Lets another process take the writer over before the first thing that is put."""

    is_first = True

    def put_new(self, key: str, data: bytes) -> None:
        if self.is_first:
            self.is_first = False
            take(self.place)
        super().put_new(key, data)


def test_who_takes_over_second_is_refused() -> None:
    with pytest.raises(OutputError, match="only process that takes it over, found epoch 1"):
        take(Interrupted().place)


def test_takeover_does_not_trust_listings() -> None:
    store = begun(StaleStore())
    for epoch in (1, 2, 3):
        log = take(store.place)
        assert log.epoch == epoch
        log.append([], [f"p{epoch}"])
    log = take(store.place)
    assert read_commits(store.place).prompt_ids == ("p1", "p2", "p3")  # listed: all but the opening
    store.num_stale = 3
    with TraceWriter.named(store.place, NAME) as writer:
        assert writer.committed == {"p1", "p2", "p3"}


# --------------------------------------------------------------------------- many writers


def test_shards_share_out_all_prompts() -> None:
    prompts = [f"p{number}" for number in range(500)]
    owners = [[Shard(i, 3).holds(prompt) for i in (1, 2, 3)] for prompt in prompts]
    assert all(sum(owner) == 1 for owner in owners)
    assert min(map(sum, zip(*owners, strict=True))) > 120
    assert Shard.parse("2/3") == Shard(2, 3)
    for text in ("0/3", "4/3", "1", "a/b", "1/0"):
        with pytest.raises(UsageError, match="1 <= I <= N"):
            Shard.parse(text)


def test_shards_write_side_by_side(tmp_path: Path) -> None:
    shards = [Shard(index, 3) for index in (1, 2, 3)]
    writers = [TraceWriter.open(tmp_path, header(), shard=shard) for shard in shards]
    for writer, prompt in zip(writers, "abc", strict=True):
        writer.commit([prompt], rows_of(prompt))
    for writer in writers:
        writer.close()
    assert TraceSet.open(tmp_path).prompt_ids == ("a", "b", "c")
    with pytest.raises(OutputError, match="--resume"):
        TraceWriter.open(tmp_path, header(), shard=shards[0])
    with TraceWriter.open(tmp_path, header(), shard=shards[0], resume=True) as writer:
        assert writer.pending("abcd") == ["d"]


def test_a_shard_of_another_run_cannot_join(tmp_path: Path) -> None:
    TraceWriter.open(tmp_path, header()).close()
    with pytest.raises(TraceMismatchError, match="drafter_digest"):
        TraceWriter.open(tmp_path, header(drafter_digest=None), shard=Shard(1, 2))


def test_writer_in_use_on_this_machine_is_refused_and_others_are_not(tmp_path: Path) -> None:
    with TraceWriter.open(tmp_path, header(), shard=Shard(2, 2)):
        with pytest.raises(OutputError, match="locked by a running collector"):
            TraceWriter.open(tmp_path, header(), shard=Shard(2, 2), resume=True)
        TraceWriter.open(tmp_path, header(), shard=Shard(1, 2)).close()


# --------------------------------------------------------------------------- other counts


def test_writers_of_another_count_are_not_joined_unasked(tmp_path: Path) -> None:
    with TraceWriter.open(tmp_path, header()) as writer:
        writer.commit(["a"], rows_of("a"))
        with pytest.raises(OutputError, match=r"--shard I/2, found writer 'shard 1/1'"):
            TraceWriter.open(tmp_path, header(), shard=Shard(1, 2))
        with pytest.raises(OutputError, match="locked by a running collector"):
            TraceWriter.open(tmp_path, header(), shard=Shard(1, 2), resume=True)
    with TraceWriter.open(tmp_path, header(), shard=Shard(2, 2), resume=True) as writer:
        assert writer.pending("ab") == ["b"]
    assert TraceSet.open(tmp_path).prompt_ids == ("a",)


def test_another_count_shuts_out_writers_that_still_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two machines, which do not see each other's locks: no prompt is ever doubled."""
    store = SetStore()
    monkeypatch.setattr("specctl.collect.store.open_place", lambda _: store.place)
    old = TraceWriter.open("set", header())
    old.commit(["a"], {})
    new = [TraceWriter.open("set", header(), shard=Shard(i, 2), resume=True) for i in (1, 2)]
    assert [writer.pending("ab") for writer in new] == [["b"], ["b"]]
    with pytest.raises(WriterFencedError, match="'shard 1/1'"):
        old.commit(["b"], {})
    new[0].commit(["b"], {})
    records = read_commits(store.place).records
    assert [r.opens for r in records].count(RETIRED) == 1  # for both, and for good
    with TraceWriter.open("set", header(), resume=True) as old:
        assert old.pending("abc") == ["c"]
        old.commit(["c"], {})
    with pytest.raises(WriterFencedError):
        new[1].commit(["c"], {})
    for writer in new:
        writer.close()
    assert sorted(read_commits(store.place).prompt_ids) == ["a", "b", "c"]


def test_every_interleaving_of_two_counts_doubles_nothing() -> None:
    """Two starts at once, before any log is there: at least one of them sees the other."""
    assert tell_all_counts() > 150


def _start(root: Path, index: int, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    with TraceWriter.open(root, header(), shard=Shard(index, 4)) as writer:
        writer.commit([f"p{index}"], {})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_may_start_a_set_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(3):
        start = context.Barrier(4)
        root = tmp_path / str(attempt)
        begun = [context.Process(target=_start, args=(root, i, start)) for i in (1, 2, 3, 4)]
        for process in begun:
            process.start()
        for process in begun:
            process.join()
        assert TraceSet.open(root).prompt_ids == ("p1", "p2", "p3", "p4")


def test_store_that_ignores_the_condition_is_refused() -> None:
    with pytest.raises(StoreError, match="one that overwrote it"):
        probe(OverwritingStore())


def test_unknown_outcomes_lose_and_double_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four writers on a store that fails a fifth of its calls, half of these after storing."""
    monkeypatch.setattr("specctl.stores.creating._wait", lambda attempt: None)
    store, acked, unknown = FaultyStore(0.2, seed=0), [], []
    begun(store)

    def write(number: int) -> None:
        for step in range(40):
            try:
                log = take(store.place, f"writer {number}")
                acked.append(log.append([], [f"{number}/{step}/a"]).digest)
                acked.append(log.append([], [f"{number}/{step}/b"]).digest)
            except SpecctlError:
                unknown.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.rate = 0.0
    held = [commit.digest for commit in read_commits(store.place).commits]
    assert len(acked) == len(set(acked))
    assert len(acked) >= 150
    assert set(acked) <= set(held)
    assert len(held) - len(acked) <= len(unknown)
    assert store.num_late > 25, "hardly an answer was lost: the test shows nothing"
