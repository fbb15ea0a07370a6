"""Sets larger than memory: what replay and tune keep does not grow with the rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from scripts.synthetic_trace import write
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, sampled
from specctl.policy import FullTree, Policy, SignalStop
from specctl.replay.metrics import LoadClock, replayed_sums
from specctl.replay.rounds import replay
from specctl.stats import split_prompts
from tests.replay.serving import linear

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
    replayed_sums(logs[0], policies, clock)  # what the first call keeps is not of a log
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
