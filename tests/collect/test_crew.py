"""The driver of many workers, without Ray: they die before and behind their commits, join and
leave, and refuse. Each prompt is finished once whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from specctl.collect import workers
from specctl.collect.config import CollectConfig
from specctl.collect.live import CollectSummary
from specctl.collect.tokens import KEEP
from specctl.collect.trace_writer import TraceWriter
from specctl.collect.workers import Crew, CrewSummary, Hand, Plan, Work
from specctl.errors import ClusterError, OutputError, SpecctlError
from specctl.logs.trace_set import read_listing
from specctl.ray_cluster import Cluster, Needs, check_sight, looker
from specctl.runtime.config import DecodingConfig
from specctl.runtime.policy_spec import resolve_policy
from tests.collect.rounds import header
from tests.collect.sets import Prompt, tables_of

MANY = [Prompt(f"p{n}", "", (f"Say {n}.",)) for n in range(40)]


class Worker:
    """Publishes made-up rows of its prompts; `refusals` are raised by `open` and `collect`."""

    refusals: ClassVar[list[tuple[str, SpecctlError]]] = []

    def open(self, work: Work, responses: None) -> tuple[str, int]:
        self.out = work.out
        self._refuse("open")
        return "here", 1

    def plan(self, prompts: list[Prompt], responses: None) -> Plan:
        with TraceWriter.open(self.out, header(), resume=True) as writer:
            return Plan([p.prompt_id for p in writer.plan(prompts)], len(prompts), ["a warning"])

    def collect(self, prompts: list[Prompt], responses: None) -> tuple[CollectSummary, float]:
        self._refuse("collect")
        with TraceWriter.open(self.out, header(), resume=True, own_prompts=True) as writer:
            ids = [prompt.prompt_id for prompt in prompts]
            writer.commit(ids, tables_of(ids, rounds=1))
        return CollectSummary(self.out, 0, 0, len(prompts)), 0.5

    def _refuse(self, doing: str) -> None:
        if self.refusals and self.refusals[0][0] == doing:
            raise self.refusals.pop(0)[1]


@dataclass(eq=False)
class Call:
    """Of a worker, to be run."""

    worker: Worker
    name: str
    given: tuple[Any, ...]


class FakeRay:
    """What a crew asks of Ray; calls run when they are waited for, in any order.

    Args:
        dies: whether a worker dies now; asked before and behind each call.
        room: CPUs of the cluster, asked again and again.
    """

    def __init__(self, dies: Callable[[], bool], room: Callable[[], int]) -> None:
        self.exceptions = SimpleNamespace(RayError=LookupError, RayTaskError=KeyError)
        self.draw, self.dies, self.room = random.Random(0), dies, room

    def remote(self, kind: type[Worker]) -> Any:
        def start() -> Any:
            worker = kind()
            calls = {
                name: SimpleNamespace(remote=lambda *given, name=name: Call(worker, name, given))
                for name in ("open", "plan", "collect")
            }
            return SimpleNamespace(**calls)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [self.draw.choice(refs)], []

    def get(self, ref: Call) -> Any:
        if self.dies():
            raise LookupError("killed before it began")
        try:
            found = getattr(ref.worker, ref.name)(*ref.given)
        except SpecctlError as error:
            raised = KeyError("raised by a task")
            raised.cause = error  # type: ignore[attr-defined]
            raise raised from None
        if self.dies():
            raise LookupError("killed before it could say so")
        return found

    def kill(self, actor: Any) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self.room()}}]


@pytest.fixture
def _doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "Worker", Worker)
    monkeypatch.setattr(workers, "LOOK_S", 0.0)
    monkeypatch.setattr(Worker, "refusals", [])


def crew(
    root: Path,
    *,
    num_workers: int | None = 3,
    dies: Callable[[], bool] = lambda: False,
    room: Callable[[], int] = lambda: 3,
    prompts: list[Prompt] = MANY,
) -> tuple[Crew, list[int], list[str]]:
    """A crew, the numbers of finished prompts that it tells, and its warnings."""
    ticks, lines = list[int](), list[str]()
    options = CollectConfig(workers=num_workers, ray="auto")
    work = Work(options, DecodingConfig(), str(root), KEEP, resolve_policy("chain"))
    ray: Any = FakeRay(dies, room)
    found = Crew(Cluster(ray, False, Needs()), work, prompts, None, ticks.append, lines.append)
    return found, ticks, lines


def check_all_once(root: Path, found: CrewSummary, ticks: list[int], num_before: int = 0) -> None:
    listing = read_listing(root)
    assert sorted(listing.prompt_ids) == sorted(prompt.prompt_id for prompt in MANY)
    assert listing.num_repeats == 0
    assert sum(ticks) == found.counts.num_committed == len(MANY) - num_before
    assert found.counts.num_skipped == num_before


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("seed", range(8))
def test_workers_that_die_join_and_leave(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(workers, "MAX_LOSSES", 100)
    TraceWriter.open(tmp_path, header()).close()
    made, ticks, lines = crew(
        tmp_path,
        num_workers=draw.choice([None, 1, 4]),
        dies=lambda: draw.random() < 0.15,
        room=lambda: draw.randint(1, 4),
    )
    found = made.run()
    check_all_once(tmp_path, found, ticks)
    assert set(lines) == {"a warning"}
    assert found.num_requeued > 0 or not any(hand.is_lost for hand in found.hands)


@pytest.mark.usefixtures("_doubles")
def test_a_new_driver_goes_on_where_another_was_killed(tmp_path: Path) -> None:
    made, ticks, _ = crew(tmp_path)
    made._on_commit = lambda count: None if count < 3 else 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        made.run()
    num_before = len(read_listing(tmp_path).prompt_ids)
    assert 0 < num_before < len(MANY)
    made, ticks, _ = crew(tmp_path)
    check_all_once(tmp_path, made.run(), ticks, num_before)


@pytest.mark.usefixtures("_doubles")
def test_workers_that_all_die_are_not_started_for_ever(tmp_path: Path) -> None:
    made, *_ = crew(tmp_path, dies=lambda: True)
    with pytest.raises(ClusterError, match="found 10 lost without a batch finished"):
        made.run()


def refusal() -> SpecctlError:
    return OutputError("s3://bucket/set", expected="a store", found="503", fix="reach it")


@pytest.mark.usefixtures("_doubles")
def test_a_worker_that_cannot_join_others_is_left_out(tmp_path: Path) -> None:
    made, ticks, lines = crew(tmp_path)
    made._hire()
    made._hear()  # one is open
    Worker.refusals = [("open", refusal())]
    check_all_once(tmp_path, made.run(), ticks)
    assert [line for line in lines if "is left out: s3://bucket/set" in line]
    assert len(made.summary.hands) == 2


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("doing", ["open", "collect"])
def test_a_store_that_refuses_ends_the_run_and_loses_nothing(doing: str, tmp_path: Path) -> None:
    Worker.refusals = [(doing, refusal())]
    made, *_ = crew(tmp_path)
    with pytest.raises(OutputError, match="s3://bucket/set: expected a store, found 503"):
        made.run()
    made, ticks, _ = crew(tmp_path)
    before = len(read_listing(tmp_path).prompt_ids) if doing == "collect" else 0
    check_all_once(tmp_path, made.run(), ticks, before)


def test_stragglers_and_the_lost_are_named() -> None:
    summary = CrewSummary(CollectSummary("set", 9, 0, 9), num_requeued=2)
    for number, rate in enumerate((4.0, 1.0, 5.0), 1):
        summary.hands.append(Hand(number, None, None, host="here", num_prompts=9, seconds=9 / rate))
    summary.hands[2].is_lost = True
    text, table = summary.parts()
    assert text.splitlines()[1:] == ["1 worker lost; 2 prompts given to others", "stragglers: 2"]
    assert [row[0] for row in table.rows] == ["1", "2", "3 (lost)"]
    assert summary.to_json()["stragglers"] == [2]


def test_workers_that_share_a_gpu_stay_on_one_node() -> None:
    node = {"CPU": 8.0, "GPU": 3.0}
    rooms = [
        Needs(cpus, gpus).room(node) for cpus, gpus in ((1, 0.0), (1, 1.0), (1, 0.5), (2, 0.1))
    ]
    assert rooms == [8, 3, 6, 4]
    assert Needs(1, 0.5).room({"CPU": 8.0}) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "1.0"}, "expected torch .*, as here, found 1.0; install that version"),
        ({"specctl": "none"}, "expected specctl .*, as here, found none"),
        ({"late_s": 100.0}, "expected a clock that agrees .* found one that is 100 s apart"),
        ({"late_s": -100.0}, "found one that is 100 s apart"),
        ({"folder": False}, "expected a folder that all nodes share"),
    ],
)
def test_nodes_that_differ_are_refused(change: dict[str, Any], words: str) -> None:
    versions, now, _ = looker()(None)
    check_sight("far", (versions, now, True), now, Path("set"))
    late_s, folder = change.pop("late_s", 0.0), change.pop("folder", True)
    with pytest.raises(ClusterError, match=words):
        check_sight("far", (versions | change, now + late_s, folder), now, Path("set"))
