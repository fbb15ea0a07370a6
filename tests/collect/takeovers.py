"""The story of a writer that is taken over: its old holder, others, and every order of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.collect.commits import Commit, writer_id
from specctl.collect.logs import read_commits
from specctl.collect.places import COMMITS, HEADER_NAME, Place
from specctl.collect.rivals import retire_rivals
from specctl.collect.shards import Shard
from specctl.collect.writer_log import WriterFencedError, WriterLog
from specctl.errors import OutputError
from specctl.stores.interface import KeyAbsentError
from tests.collect.memory_store import SetStore
from tests.collect.rounds import header
from tests.collect.schedules import Actor, Step, all_runs

NAME = "shard 1/1"


def begun(store: SetStore) -> SetStore:
    """A store of a set that holds its header."""
    store.kept[HEADER_NAME] = header().to_bytes()
    return store


def take(place: Place, name: str = NAME) -> WriterLog:
    """A writer's log under the header of the tests."""
    return WriterLog.take(place, name, header().digest)


class Turns:
    """A store of which every observable operation is a step of the actor that holds it."""

    def __init__(self, store: SetStore, step: Step) -> None:
        self.inner, self._step, self.url = store, step, store.url
        self.place = Place(self, None, self.url)

    def put_new(self, key: str, data: bytes) -> None:
        self._step()
        self.inner.put_new(key, data)

    def objects(self, prefix: str) -> object:
        self._step()
        return self.inner.objects(prefix)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        try:
            return self.inner.get(key, max_bytes=max_bytes)  # what is there stays as it is
        except KeyAbsentError:
            self._step()
            return self.inner.get(key, max_bytes=max_bytes)


class Story:
    """One run: what was acknowledged to whom, over one store.

    Args:
        num_commits: of the holder that is there from the start.
    """

    def __init__(self, num_commits: int, num_resumes: int) -> None:
        self._prompts = [f"p{number}" for number in range(num_commits)]
        self.store = begun(SetStore())
        self.logs = [take(self.store.place)]
        self.acked: list[Commit] = []
        self.actors: Sequence[Actor] = [self._old, *[self._resume] * num_resumes]

    def _old(self, step: Step) -> None:
        self._commits(self.logs[0], step, *self._prompts)

    def _resume(self, step: Step) -> None:
        place = Turns(self.store, step).place
        try:
            log = take(place)
        except OutputError:
            return  # another resume was first
        self.logs.append(log)
        self._commits(log, step, f"c{log.epoch}")

    def _commits(self, log: WriterLog, step: Step, *prompts: str) -> None:
        log.place = Turns(self.store, step).place
        try:
            for prompt in prompts:
                self.acked.append(log.append([], [prompt]))
        except WriterFencedError:
            return

    def check(self) -> None:
        """Nothing that was acknowledged is missing; one holder is left, the newest."""
        held = read_commits(self.store.place).commits
        assert {commit.digest for commit in self.acked} == {commit.digest for commit in held}
        newest = max(self.logs, key=lambda log: log.epoch or 0)
        assert len({log.epoch for log in self.logs}) == len(self.logs)
        for log in self.logs:
            log.place = self.store.place
            if log is not newest:
                assert _is_fenced(log)
        newest.append([], ["last"])


def _is_fenced(log: WriterLog) -> bool:
    try:
        log.append([], ["late"])
    except WriterFencedError:
        return True
    return False


@dataclass
class Told:
    """All schedules of a story. num_fenced: those that kept the old holder from committing."""

    num_runs: int = 0
    num_fenced: int = 0
    num_takeovers: int = 0


def tell_all(num_commits: int, num_resumes: int) -> Told:
    """Runs a story under every schedule and checks its laws after each."""
    stories: list[Story] = []

    def make() -> Sequence[Actor]:
        stories.append(Story(num_commits, num_resumes))
        return stories[-1].actors

    told = Told()
    for _ in all_runs(make):
        story = stories.pop()
        story.check()
        told.num_runs += 1
        told.num_fenced += sum(commit.epoch == 1 for commit in story.acked) < num_commits
        told.num_takeovers += len(story.logs) - 1
    return told


class Counts:
    """Two processes that start one set under different `--shard` counts, and want one prompt."""

    def __init__(self) -> None:
        self.store = begun(SetStore())
        self.acked: list[Commit] = []
        self.actors = [lambda step, n=n: self._collect(Shard(1, n), step) for n in (1, 2)]

    def _collect(self, shard: Shard, step: Step) -> None:
        place = Starts(self.store, step).place
        try:
            log = take(place, shard.name)
            chains = {
                writer_id(shard.name): log.taken,
                **retire_rivals(place, shard, header().digest),
            }
            if "p" not in read_commits(place, chains=chains).prompt_ids:
                self.acked.append(log.append([], ["p"]))
        except OutputError:
            return  # shut out by the other one


class Starts(Turns):
    """Steps are what is put, and what is seen of all logs together."""

    def objects(self, prefix: str) -> object:
        return super().objects(prefix) if prefix == COMMITS else self.inner.objects(prefix)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.inner.get(key, max_bytes=max_bytes)


def tell_all_counts() -> int:
    """All schedules of two counts: no prompt twice, none acknowledged and gone; their number."""
    stories: list[Counts] = []

    def make() -> Sequence[Actor]:
        stories.append(Counts())
        return stories[-1].actors

    num_runs = num_acked = 0
    for _ in all_runs(make):
        story = stories.pop()
        held = read_commits(story.store.place).commits  # refuses a prompt that stands twice
        assert [c.digest for c in story.acked] == [c.digest for c in held]
        num_runs, num_acked = num_runs + 1, num_acked + len(held)
    assert num_acked > num_runs / 4, "hardly anybody gets to commit: nothing is shown"
    return num_runs
