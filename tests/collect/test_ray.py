"""Collection by actors of a real Ray, killed and resumed: the set is that of one process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from specctl.collect import ray_workers
from specctl.collect.ray_cluster import Cluster, Needs, check_node, looker
from specctl.collect.ray_workers import Crew
from specctl.errors import ClusterError, PromptLineError
from specctl.logs.trace_set import TraceSet, read_listing
from tests.cli.command import OUTPUT, USAGE, passes, refuses, write_lines
from tests.collect.crew import EagerWorker

ray = pytest.importorskip("ray")
DENSE = ("--dense", "--depth", "3", "--children", "3")
CHAIN = ("--policy", "chain")
SMALL = ("--max-new-tokens", "8", "--device", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster with room for four workers, which this process is connected to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # a token would be written to the user's home
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        before = signal.getsignal(signal.SIGTERM)
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "Worker", EagerWorker)


def prompts_file(folder: Path, count: int) -> Path:
    return write_lines(folder / "p.txt", *(f"How much is {n} + 3?" for n in range(count)))


def check_equal_to_one_process(folder: Path, *options: str) -> None:
    """The rows of `set` are those that one process writes, in any order."""
    alone = folder / "alone"
    passes("collect", folder / "p.txt", "-o", alone, *SMALL, *options)
    assert read_listing(folder / "set").header.collect == read_listing(alone).header.collect
    for table in ("rounds", "nodes"):
        assert rows(folder / "set", table).equals(rows(alone, table))
    passes("traces", "verify", folder / "set")


def rows(folder: Path, table: str) -> pl.DataFrame:
    """Without timings, which differ from run to run."""
    frame = TraceSet.open(folder).scan(table).collect()
    frame = frame.drop([name for name in frame.columns if name.endswith("_us")])
    return frame.sort([n for n in ("request_id", "round_idx", "node_idx") if n in frame.columns])


class Killer(threading.Thread):
    """Kills workers of a crew at random moments: behind so many finished prompts, and some time."""

    def __init__(self, crew: Crew, num_kills: int, num_prompts: int) -> None:
        super().__init__(daemon=True)
        self.draw, self.crew = random.Random(0), crew
        self.moments = sorted(self.draw.sample(range(1, num_prompts // 2), num_kills))

    def run(self) -> None:
        for moment in self.moments:
            while not self.kills(moment):
                time.sleep(self.draw.uniform(0.0, 0.1))

    def kills(self, moment: int) -> bool:
        alive = [hand.pid for hand in self.crew.hands if hand.pid and not hand.is_lost]
        if not alive or self.crew.counts.num_committed < moment:
            return False
        os.kill(self.draw.choice(alive), signal.SIGKILL)
        return True


@pytest.mark.usefixtures("eager", "address")
@pytest.mark.parametrize(
    ("num_kills", "num_prompts"),
    [(3, 120), pytest.param(10, 400, marks=pytest.mark.nightly)],
)
def test_four_workers_that_are_killed(
    num_kills: int, num_prompts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Crew.run

    def watched(crew: Crew) -> ray_workers.CrewSummary:
        Killer(crew, num_kills, num_prompts).start()
        return run(crew)

    monkeypatch.setattr(Crew, "run", watched)
    words = (prompts_file(tmp_path, num_prompts), "-o", tmp_path / "set", *SMALL, *CHAIN)
    found = passes("collect", *words, "--ray", "auto", "--workers", "4", "--json")
    told = json.loads(found.out)
    assert [told["num_planned"], told["num_committed"]] == [num_prompts, num_prompts]
    assert sum(worker["is_lost"] for worker in told["workers"]) == num_kills
    listing = read_listing(tmp_path / "set")
    assert (len(listing.prompt_ids), listing.num_repeats) == (num_prompts, 0)
    check_equal_to_one_process(tmp_path, *CHAIN)


DRIVER = """
import sys
from specctl.cli import main
from specctl.collect import ray_workers
from tests.collect.crew import EagerWorker
ray_workers.Worker = EagerWorker
main()
"""


@pytest.mark.usefixtures("eager")
def test_two_workers_whose_driver_is_killed(address: str, tmp_path: Path) -> None:
    path, out = prompts_file(tmp_path, 40), tmp_path / "set"
    words = ["collect", path, "-o", out, *SMALL, *DENSE, "--workers", "2", "--resume", "--json"]
    command = [sys.executable, "-c", DRIVER, *map(str, words), "--ray", address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
        while not any(out.glob("rounds/*.parquet")):
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.02)
        driver.kill()
    told = json.loads(passes(*words, "--ray", "auto").out)
    assert told["num_skipped"] > 0
    assert told["num_skipped"] + told["num_committed"] == 40
    assert [worker["worker"] for worker in told["workers"]] == [1, 2]
    check_equal_to_one_process(tmp_path, *DENSE)
