"""Chains of a log, what was tested on them, and what policies spend there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, join_chunks, read_chains
from specctl.policy import Chain, EntropyStop, Policy, RootOnly, SignalStop, StaticTree
from specctl.replay.fit_inputs import DISTANCE, prompt_costs, target_steps, tokens_tested
from specctl.replay.rounds import Rounds, replay
from tests.replay.logs import plain_trees, random_traces

DEPTH = 5


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    folder = tmp_path_factory.mktemp("dense") / "traces"
    return random_traces(folder, num_prompts=3, depth=DEPTH, top_k=3)


@pytest.fixture(scope="module")
def log(traces: TraceSet) -> DenseLog:
    return DenseLog.open(traces)


@pytest.fixture(scope="module")
def chains(log: DenseLog) -> DenseLog:
    return read_chains(log, extra=(DISTANCE,))


def rows_of(rounds: Rounds) -> list[tuple[int, ...]]:
    o = rounds.outcomes
    columns = (o.accepted, o.verified, o.levels, o.wanted, o.missing, o.censored)
    return list(zip(rounds.request.tolist(), *(c.tolist() for c in columns), strict=True))


@pytest.mark.parametrize(
    "shape",
    [
        RootOnly(),
        Chain(num_draft_tokens=3),
        Chain(num_draft_tokens=DEPTH + 2),
        SignalStop(signal="entropy", threshold=1.0, window=DEPTH),
        EntropyStop(window=DEPTH, min_samples=1),
        EntropyStop(window=DEPTH + 1, min_samples=1),
    ],
    ids=["ar", "chain", "deeper than the log", "stop", "online", "online, deeper"],
)
def test_chains_replay_as_in_the_whole_log(
    log: DenseLog, chains: DenseLog, shape: Chain | SignalStop | EntropyStop
) -> None:
    policy = Policy(shape=shape)
    [whole], [part] = replay(log, [policy]), replay(chains, [policy])
    assert rows_of(part) == rows_of(whole)
    for name in ("calls_low", "calls_high", "verified_low", "verified_high"):
        assert getattr(part.bounds, name).tolist() == getattr(whole.bounds, name).tolist()


def test_trees_are_missed_and_not_guessed(chains: DenseLog) -> None:
    [found] = replay(chains, [Policy(shape=StaticTree(depth=2, top_k=3, num_tokens=6))])
    assert (found.outcomes.missing > 0).all()


def test_chunks_join_without_a_seam(log: DenseLog, chains: DenseLog) -> None:
    [chunk] = chains.held
    twice = join_chunks([chunk, chunk])
    held = replace(chains, held=(twice,))
    policy = Policy(shape=EntropyStop(window=DEPTH, min_samples=1))
    [once], [doubled] = replay(chains, [policy]), replay(held, [policy])
    rows, size = rows_of(doubled), len(rows_of(once))
    assert rows[:size] == rows_of(once)
    assert [row[1:] for row in rows[size:]] == [row[1:] for row in rows_of(once)]
    assert [row[0] for row in rows[size:]] == [row[0] + 3 for row in rows_of(once)]


def plain_tokens(traces: TraceSet, window: int) -> list[tuple[str, bool, float, float]]:
    """Node by node: accepted tokens and the first rejected one of every round."""
    rounds = traces.scan("rounds").select(pl.col("prompt_id").cast(pl.String)).collect()
    names = rounds["prompt_id"].unique(maintain_order=True).to_list()
    table = traces.scan("nodes").select("request_id", "round_idx", "parent_entropy", DISTANCE)
    nodes = table.collect().partition_by("request_id", "round_idx", maintain_order=True)
    found, first = [], 0
    for name, trees in zip(names, plain_trees(traces), strict=True):
        here = 0
        while here < len(trees):
            tree, values = trees[here], nodes[first + here]
            node, accepted = 0, 0
            while accepted < window:
                node = tree.children[node][0]
                if accepted == tree.remaining:
                    break  # the text ends here: nothing was rejected
                entropy, distance = (values[c][node] for c in ("parent_entropy", DISTANCE))
                found.append((name, tree.on_path[node], entropy, distance))
                if not tree.on_path[node]:
                    break
                accepted += 1
            here += accepted + 1
        first += len(trees)
    return found


@pytest.mark.parametrize("window", [1, 3, DEPTH])
def test_tested_tokens_are_those_of_the_plain_telling(
    traces: TraceSet, log: DenseLog, chains: DenseLog, window: int
) -> None:
    wanted = sorted(plain_tokens(traces, window))
    for source in (log, chains):
        found = tokens_tested(source, window)
        columns = (found.prompt_id, found.accepted, found.entropy, found.distance)
        rows = sorted(zip(*(c.tolist() for c in columns), strict=True))
        assert [row[:2] for row in rows] == [row[:2] for row in wanted]
        numbers = [[float(v) for v in row[2:]] for row in rows]
        expected = [[np.nan if v is None else v for v in row[2:]] for row in wanted]
        np.testing.assert_allclose(numbers, expected, rtol=1e-6)
    assert {accepted for _, accepted, *_ in wanted} == {True, False}


def test_costs_are_sums_by_prompt(chains: DenseLog) -> None:
    policy = Policy(shape=Chain(num_draft_tokens=3))
    [run] = replay(chains, [policy])
    [costs] = prompt_costs(chains, [policy], target_steps(0.25))
    assert costs.time.tolist() == pytest.approx((costs.calls * 1.75).tolist())
    assert costs.levels.tolist() == (3 * costs.calls).tolist()
    assert costs.verified.tolist() == (4 * costs.calls).tolist()
    assert costs.tokens.tolist() == run.positions.num_tokens.tolist()
    assert costs.calls.sum() == len(run.request)
    assert costs.support == 1.0


def test_reading_tells_its_progress(tmp_path: Path) -> None:
    log = DenseLog.open(random_traces(tmp_path / "traces", num_prompts=1, depth=2, top_k=2))
    seen: list[int] = []
    read_chains(log, on_positions=seen.append)
    assert sum(seen) == 128
