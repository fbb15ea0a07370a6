"""The story of a writer that is taken over: its old holder, others, and every order of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.collect.commits import Commit
from specctl.collect.logs import read_commits
from specctl.collect.places import Place
from specctl.collect.writer_log import WriterFencedError, WriterLog
from specctl.errors import OutputError
from specctl.stores.interface import KeyAbsentError
from tests.collect.memory_store import MemoryStore
from tests.collect.schedules import Actor, Step, all_runs

NAME = "shard 1/1"


class Turns:
    """A store of which every observable operation is a step of the actor that holds it."""

    def __init__(self, store: MemoryStore, step: Step) -> None:
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
        self.store = MemoryStore()
        self.logs = [WriterLog.take(self.store.place, NAME)]
        self.acked: list[Commit] = []
        self.actors: Sequence[Actor] = [self._old, *[self._resume] * num_resumes]

    def _old(self, step: Step) -> None:
        self._commits(self.logs[0], step, *self._prompts)

    def _resume(self, step: Step) -> None:
        place = Turns(self.store, step).place
        try:
            log = WriterLog.take(place, NAME)
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
