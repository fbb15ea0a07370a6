"""Collection by actors of a real Ray, killed and resumed: the set is that of one process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from specctl.collect import workers
from specctl.collect.workers import Driver
from specctl.logs.trace_set import read_listing
from tests.cli.command import OUTPUT, USAGE, passes, refuses, specctl, write_lines
from tests.collect.sets import sorted_rows
from tests.servers import free_port

DENSE = ("--dense", "--depth", "3", "--children", "3")
CHAIN = ("--policy", "chain")
SMALL = ("--max-new-tokens", "8", "--device", "cpu", "--threads", "1")
pytestmark = pytest.mark.usefixtures("ray_address")


def prompts_file(folder: Path, count: int) -> Path:
    return write_lines(folder / "p.txt", *(f"How much is {n} + 3?" for n in range(count)))


def check_equal_to_one_process(out: str | Path, folder: Path, *options: str) -> None:
    """The rows of a set are those that one process writes, in any order, each prompt once."""
    listing, alone = read_listing(out), folder / "alone"
    passes("collect", folder / "p.txt", "-o", alone, *SMALL, *options)
    assert listing.header.collect == read_listing(alone).header.collect
    assert listing.num_repeats == 0
    for table in ("rounds", "nodes"):
        assert sorted_rows(out, table).equals(sorted_rows(alone, table))


@pytest.fixture
def _killed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Kills so many workers while they collect, each behind so many more finished prompts."""
    num_kills, step = request.param
    collect, draw = Driver.collect, random.Random(0)

    def watched(driver: Driver, *given: Any) -> None:
        killed, num_finished = set[int](), 0

        def tick(_: str, count: int) -> None:
            nonlocal num_finished
            num_finished += count
            there = {pid for _, pid in driver.processes} - killed
            if there and len(killed) < min(num_kills, num_finished // step):
                pid = draw.choice(sorted(there))
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(workers, "advance", tick)
        collect(driver, *given)

    monkeypatch.setattr(Driver, "collect", watched)


DRIVER = """
import os, signal, sys
from specctl.cli import main
from specctl.collect import workers

# At once after a third batch, while both workers may collect or commit others.
ticks = iter([None, None])
workers.advance = lambda *_: next(ticks, 0) is None or os.kill(os.getpid(), signal.SIGKILL)
main()
"""


@pytest.mark.usefixtures("_killed")
@pytest.mark.parametrize(
    ("_killed", "num_prompts", "options"),
    [
        pytest.param((1, 2), 12, CHAIN, id="once"),
        pytest.param((10, 5), 120, DENSE, id="ten times, dense", marks=pytest.mark.nightly),
    ],
    indirect=["_killed"],
)
def test_a_driver_is_killed_and_then_workers_of_the_next(
    s3_url: str,
    num_prompts: int,
    options: tuple[str, ...],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """In a bucket, by a cluster that the command starts and by one that it joins."""
    path = prompts_file(tmp_path, num_prompts)
    words = ["collect", str(path), "-o", s3_url, *SMALL, *options, "--resume", "--json"]
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, *words, "--workers", "2"], capture_output=True
    )
    assert driver.returncode == -signal.SIGKILL, driver
    ended = specctl(*words, "--workers", "2", "--ray", "auto")
    assert ended.code == 0, ended
    [num_lost] = re.findall(r"(\d+) workers? lost; others collected their prompts", ended.err)
    assert 0 < int(num_lost) <= request.node.callspec.params["_killed"][0]
    told = json.loads(ended.out)
    assert told["num_skipped"] >= 3
    assert told["num_skipped"] + told["num_committed"] == num_prompts == num_finished(s3_url)
    check_equal_to_one_process(s3_url, tmp_path, *options)


def num_finished(out: str) -> int:
    return len(read_listing(out).prompt_ids)


def test_what_cannot_run_is_refused_before_any_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("collect", "embedded", "-o", tmp_path / "set", "--ray")
    no_gpus = "each worker needs 1 CPU and {} on one node, and the cluster has room for 0: 4 "
    for options, code, said in (
        (("auto", "--device", "cuda"), OUTPUT, no_gpus.format("1 GPU")),
        (("auto", "--gpus-per-worker", "2"), OUTPUT, no_gpus.format("2 GPUs")),
        (("auto", "--gpus-per-worker", "1.5"), USAGE, "above 1 must be a whole number, not 1.5"),
        (
            ("auto", "--gpus-per-worker", "1", "--device", "cpu"),
            USAGE,
            "cannot be used with --device cpu",
        ),
        (("auto", "--device", "cuda:1"), USAGE, "Ray gives each worker its own GPUs"),
        (("auto", "--threads", "5"), OUTPUT, "each worker needs 5 CPUs on one node"),
        (("somewhere",), USAGE, "--ray takes auto or HOST:PORT"),
    ):
        assert said in refuses(code, *words, *options)
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        dead = f"127.0.0.1:{free_port()}"
        line = refuses(OUTPUT, *words, dead)
        assert "no cluster answers" in line
        # What the last `ray start` left, and its cluster has ended.
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_TMPDIR", str(tmp_path))
        (tmp_path / "ray").mkdir()
        write_lines(tmp_path / "ray" / "ray_current_cluster", dead)
        assert f"{dead}: " in refuses(OUTPUT, *words, "auto")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install ray" in refuses(USAGE, *words[:-1], "--workers", 2)
    passes(*words[:-1], *SMALL, "--limit", 1)  # this process alone needs no Ray
    assert num_finished(str(tmp_path / "set")) == 1


GONE = """
import ray
from specctl.cli import main
from specctl.collect import workers

committed = [0]
def tick(_, count):
    committed[0] += count
    if committed[0] > 2:
        ray._private.worker._global_node.kill_raylet(check_alive=False)

workers.advance = tick
main()
"""


@pytest.mark.nightly
def test_a_cluster_that_is_gone_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a minute; what was finished is kept."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    words = ["collect", str(prompts_file(tmp_path, 48)), "-o", str(tmp_path / "set"), *SMALL]
    begun = time.monotonic()
    driver = subprocess.run(
        [sys.executable, "-c", GONE, *words, *CHAIN, "--workers", "2"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert driver.returncode == OUTPUT, driver
    assert "go on with --resume" in driver.stderr
    assert time.monotonic() - begun < 120, "a minute, and the start"
    assert 3 <= num_finished(str(tmp_path / "set")) < 48
    passes(*words, *CHAIN, "--resume")
    check_equal_to_one_process(tmp_path / "set", tmp_path, *CHAIN)
