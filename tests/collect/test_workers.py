"""A worker of a collection, without Ray: batches that are given out again, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.collect.config import CollectConfig
from specctl.collect.live import LiveSummary
from specctl.collect.prompts import Prompt
from specctl.collect.trace_writer import TraceWriter
from specctl.collect.workers import (
    Needs,
    Work,
    Worker,
    check_shared,
    check_versions,
    cluster,
    process_here,
    versions_here,
)
from specctl.errors import ClusterError
from specctl.logs.trace_set import read_listing
from specctl.runtime.config import DecodingConfig
from specctl.runtime.words import resolve_policy
from tests.collect.rounds import header
from tests.collect.sets import tables_of

PROMPTS = [Prompt(f"p{n}", "", (f"Say {n}.",)) for n in range(6)]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Of a set that was begun, whose rows are made up; no pair is loaded."""

    def collect(self: Work, _: Any, prompts: list[Prompt], *__: Any, **more: Any) -> LiveSummary:
        with TraceWriter.open(self.out, header(), **more) as writer:
            left = [prompt.prompt_id for prompt in writer.plan(prompts)]
            if left:
                writer.commit(left, tables_of(left, rounds=1))
        return LiveSummary(self.out, len(prompts), len(prompts) - len(left), len(left))

    monkeypatch.setattr(Work, "collect", collect)
    monkeypatch.setattr(Worker, "_decoder", None)
    TraceWriter.open(tmp_path, header()).close()
    return Work(CollectConfig(), DecodingConfig(), str(tmp_path), resolve_policy("chain"))


def test_a_batch_that_is_given_out_again_is_collected_once(work: Work) -> None:
    """To a process that was made for a lost one, and to one whose answer was lost."""
    lost, other = Worker(work), Worker(work)
    assert lost.collect(PROMPTS[:3], None)[0].num_committed == 3
    for again in (other, other, lost):
        summary, process = again.collect(PROMPTS[:4], None)
        assert summary.num_committed == 4, "all of the batch are there"
        assert process == process_here()
    listing = read_listing(work.out)
    assert (sorted(listing.prompt_ids), listing.num_repeats) == (["p0", "p1", "p2", "p3"], 1)


def test_machines_that_differ_are_refused(work: Work, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="does not share the folder"):
        check_shared(str(tmp_path / "elsewhere"))
    check_shared(work.out)
    here = versions_here()
    check_versions(here, here)
    with pytest.raises(ClusterError, match=r"has torch 1\.0, and .*; install that version"):
        check_versions(here, here | {"torch": "1.0"})


def test_workers_that_share_a_gpu_stay_on_one_node() -> None:
    node = {"CPU": 8.0, "GPU": 3.0}
    rooms = [
        Needs(cpus, gpus).room(node) for cpus, gpus in ((1, 0.0), (1, 1.0), (1, 0.5), (2, 0.1))
    ]
    assert rooms == [8, 3, 6, 4]
    assert Needs(1, 0.5).room({"CPU": 8.0}) == 0


def test_a_raylet_that_dies_as_it_starts_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray's own node does

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with (
        pytest.raises(ClusterError, match=r"Ray on this machine: .* timed out during startup"),
        cluster(2, None, threads=1, gpus=None, device="cpu"),
    ):
        pass
