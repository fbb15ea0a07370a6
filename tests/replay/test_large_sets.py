"""Sets larger than memory: what replay and tune keep does not grow with the rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import synthetic_trace
from scripts.synthetic_trace import renamed, write
from specctl.collect.trace_writer import TraceWriter
from specctl.logs.trace_set import TraceSet, read_listing
from specctl.logs.tree_log import DenseLog, sampled
from specctl.policy import Chain, FullTree, Policy, SignalStop, StaticTree
from specctl.replay.metrics import LoadClock, replayed_sums
from specctl.replay.rounds import replay
from specctl.stats import split_prompts
from tests.replay.serving import linear

TREE = StaticTree(depth=3, top_k=2, num_tokens=6)
POLICIES = [Policy(shape=Chain(num_draft_tokens=2)), Policy(shape=TREE)]
MAY_GROW = 0.35
"""Of what all rounds would take: names and sums of prompts."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[DenseLog, DenseLog]:
    """Of 4 and of 33 prompts of 128 positions, a segment each."""
    folder, shape = tmp_path_factory.mktemp("large"), FullTree(depth=3, top_k=2)
    rows = write(folder / "few", shape, num_nodes=6 * 128 * 7, prompts_per_commit=1, seed=0)
    write(folder / "many", shape, num_nodes=8 * rows, prompts_per_commit=1, seed=0)
    few, many = (DenseLog.open(TraceSet.open(folder / name)) for name in ("few", "many"))
    assert many.num_positions >= 7 * few.num_positions
    return few, many


def peak_of(work: Callable[[], object]) -> int:
    """Most bytes of Python and numpy at a time, after a first run."""
    work()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_tune_keeps_sums_by_prompt(logs: tuple[DenseLog, DenseLog]) -> None:
    """What stays of a larger log is a row a prompt and policy, less than all its rounds are."""
    policies = [Policy(shape=SignalStop(signal="confidence", threshold=0.3, window=2))]
    clock = LoadClock(linear())
    few, many = (peak_of(lambda log=log: replay(log, policies)) for log in logs)
    few_sums, many_sums = (
        peak_of(lambda log=log: replayed_sums(log, policies, clock)) for log in logs
    )
    assert many_sums - few_sums < MAY_GROW * (many - few)


def test_a_sample_of_whole_prompts_stays_within_its_bound(
    logs: tuple[DenseLog, DenseLog], caplog: pytest.LogCaptureFixture
) -> None:
    _, log = logs
    said = caplog.messages
    assert sampled(log, log.num_positions, 0) is log
    assert not said
    found = sampled(log, 10 * 128 + 100, 0)
    said = caplog.messages
    assert found.num_positions == sum(c.positions.num_rows for c in found.chunks()) == 10 * 128
    assert len(said) == 1
    assert "10 of 33, with 1,280 of 4,224 positions; see --max-positions" in said[0]
    again, other = (sampled(log, 10 * 128, seed) for seed in (0, 1))
    assert again.prompts == found.prompts != other.prompts
    split = split_prompts(found.prompts or (), held_out_frac=0.3, seed=0)
    assert 1 < len(split.held_out) < 9, "its hash is not that of the split"


ALLOWED = {"replay": 28 << 20, "tune": 36 << 20}
"""Bytes above what a process holds that has read a small set: threads, allocators, one segment.

Replay needs less than 13 MiB on an idle machine and over 20 on a busy one, where allocators give
freed pages back later. The set grows with the limit."""


def write_limited(work: Path, allowed: int) -> None:
    """`large`, over 8 times what is allowed as tables in memory, and `warm`, its beginning."""
    shape = FullTree(depth=9, top_k=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_trace, "POSITIONS", 12)
        synthetic_trace.write(work / "one", shape, num_nodes=1, prompts_per_commit=5, seed=0)
    listing = read_listing(work / "one", verify=False)
    [segment] = listing.segments
    tables, size = listing.tables(segment), 0
    for name, least in (("warm", 8 << 20), ("large", 8 * allowed)):
        turn = size = 0
        with TraceWriter.open(work / name, listing.header) as writer:
            while size <= least:
                fresh = {table: renamed(rows, f"{turn}:") for table, rows in tables.items()}
                writer.commit([f"{turn}:{prompt}" for prompt in segment.prompt_ids], fresh)
                size, turn = size + sum(rows.nbytes for rows in fresh.values()), turn + 1


@pytest.mark.nightly
@pytest.mark.parametrize("verb", ALLOWED)
def test_a_set_eight_times_larger_than_memory(verb: str, tmp_path: Path) -> None:
    """Under a limit that its rows do not fit into, the figures are those of all the memory.

    Threads have small stacks, of which the limit counts the whole; no library keeps pools.
    """
    write_limited(tmp_path, ALLOWED[verb])
    settings = {
        "MALLOC_ARENA_MAX": "1", "POLARS_MAX_THREADS": "1", "ARROW_IO_THREADS": "1",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    child = [sys.executable, "-m", "tests.replay.limited", tmp_path, str(ALLOWED[verb]), verb]
    script = 'ulimit -s 512; exec "$@"'
    ended = subprocess.run(
        ["bash", "-c", script, "limited", *map(str, child)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert not found["fits"], "the limit holds nothing back"
    assert found["limited"] == found["whole"]
    assert found["whole"][0] == 0, found["whole"][1]
