"""Replay and tuning by tasks of a cluster: the figures of one process, to the last bit."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.synthetic_trace import write
from specctl import ray_cluster
from specctl.errors import ClusterError, TraceCorruptError, TraceMismatchError
from specctl.logs import tree_log
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import FullTree
from specctl.ray_cluster import Cluster, Needs, Spread
from tests.cli.command import passes
from tests.replay.tune_cases import linear_file

POLICIES = ("-p", "ar", "-p", "chain:num_draft_tokens=2", "-p", "svip:window=2")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven segments or more, of some prompts each."""
    folder = tmp_path_factory.mktemp("spread") / "traces"
    write(folder, FullTree(depth=3, top_k=2), num_nodes=40_000, prompts_per_commit=4, seed=0)
    assert len(list((folder / "rounds").glob("*.parquet"))) >= 7
    return folder


class FakeRay:
    """Tasks that travel as bytes, as those of Ray do, and run when they are asked for; some are
    lost once."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=LookupError, RayTaskError=KeyError)
        self.draw, self.running, self.most, self.is_lost = random.Random(0), 0, 0, False

    def put(self, value: object) -> object:
        return value

    def remote(self, work: Callable[[Any, Any], Any]) -> Any:
        from ray import cloudpickle

        def start(shared: Any, item: Any) -> Callable[[], Any]:
            self.running += 1
            self.most = max(self.most, self.running)
            task = cloudpickle.dumps((work, shared, item))

            def run() -> Any:
                again, *given = pickle.loads(task)
                return pickle.loads(pickle.dumps(again(*given)))

            return run

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def get(self, call: Callable[[], Any]) -> Any:
        self.running -= 1
        if self.is_lost:
            raise LookupError("the node died")
        try:
            return call()
        except Exception as error:
            raised = KeyError("raised by a task")
            raised.cause = error  # type: ignore[attr-defined]
            raise raised from None

    def cancel(self, call: object, **_: object) -> None:
        self.running -= 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """In the place of Ray, for `--workers` and, with the sets opened again, for `--ray`."""
    found = FakeRay()

    @contextmanager
    def made(num: int | None, address: str | None, **_: Any) -> Iterator[Cluster]:
        yield Cluster(found, address is None, Needs())

    monkeypatch.setattr(ray_cluster, "cluster", made)
    monkeypatch.setattr(Cluster, "check_nodes", lambda self, out: None)
    monkeypatch.setattr(Cluster, "room", lambda self: 2)
    tree_log._opened_again.cache_clear()
    return found


@pytest.mark.parametrize("spread", [("--workers", 1), ("--workers", 3), ("--ray", "auto")])
def test_replay_gives_the_same_bytes(
    traces: Path, tmp_path: Path, fake: FakeRay, spread: tuple[str, object]
) -> None:
    times = ("--cost-model", linear_file(tmp_path / "times.json"))
    plain = passes("replay", traces, *POLICIES, *times, "--json").out
    assert passes("replay", traces, *POLICIES, *times, "--json", *spread).out == plain
    assert fake.running == 0
    assert 1 <= fake.most <= 1 + (3 if 3 in spread else 2)


def test_so_does_tuning_and_a_load(traces: Path, tmp_path: Path, fake: FakeRay) -> None:
    times, few = ("--cost-model", linear_file(tmp_path / "times.json")), ("--held-out", 0.4)
    for words in (
        ("tune", traces, "--family", "svip", *times, *few),
        ("replay", traces, *POLICIES[:4], *times, "--batch-size", 4),
    ):
        plain = passes(*words, "--json").out
        assert fake.most == 0
        assert passes(*words, "--json", "--workers", 2).out == plain
        assert fake.most > 0
        fake.most = 0


def test_what_a_task_raises_is_the_commands(traces: Path, fake: FakeRay) -> None:
    log = replace(
        DenseLog.open(TraceSet.open(traces)), spread=Spread(Cluster(fake, True, Needs()), 2)
    )
    damage = TraceCorruptError("a file", expected="rows", found="none", fix="restore it")

    def fail(chunk: object) -> None:
        raise damage

    with pytest.raises(TraceCorruptError) as refused:
        list(log.each(fail))
    assert str(refused.value) == str(damage)
    assert fake.running == 0  # the others are cancelled
    fake.is_lost = True
    with pytest.raises(ClusterError, match="the node died"):
        list(log.each(len))


def test_another_machine_refuses_a_set_that_grew(traces: Path, fake: FakeRay) -> None:
    """It would read rows that the command does not know of."""
    spread = Spread(Cluster(fake, False, Needs()), 2, (str(traces),))
    log = replace(DenseLog.open(TraceSet.open(traces)), spread=spread, digest="sha256:" + "0" * 64)
    with pytest.raises(TraceMismatchError, match="being written"):
        list(log.each(lambda chunk: chunk.positions.num_rows))


@pytest.mark.nightly
def test_on_a_real_cluster(traces: Path, tmp_path: Path, ray_address: str) -> None:
    """Tasks in processes of their own, which open the set again."""
    times = ("--cost-model", linear_file(tmp_path / "times.json"))
    plain = passes("replay", traces, *POLICIES, *times, "--json").out
    for words in (("--ray", ray_address), ("--ray", ray_address, "--workers", 1)):
        assert passes("replay", traces, *POLICIES, *times, "--json", *words).out == plain
    words = ("tune", traces, "--family", "svip", *times, "--held-out", 0.4, "--json")
    assert passes(*words, "--ray", ray_address).out == passes(*words).out
