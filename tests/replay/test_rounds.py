"""Replay against a telling in plain Python, node by node; summaries against replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specctl import progress
from specctl.errors import UsageError
from specctl.logs import tree_log
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import (
    Chain,
    EntropyStop,
    FullTree,
    Mars,
    Policy,
    RootOnly,
    ScoredTree,
    SignalStop,
    StaticTree,
    SurvivalBudget,
)
from specctl.replay.rounds import Rounds, replay, replay_chunk, walk
from specctl.replay.run import check_keeps_something
from specctl.replay.score import score, sums_to_score
from specctl.replay.static import static_outcomes, summarise
from specctl.replay.submissions import submissions_of
from tests.policy.scorers import random_network, steps
from tests.replay.logs import log_fixtures, plain_trees, random_log

traces, log = log_fixtures(num_prompts=2, depth=5, top_k=4)


def counted(rounds: Rounds) -> list[tuple[int, int]]:
    o = rounds.outcomes
    return list(zip(o.accepted.tolist(), o.verified.tolist(), strict=True))


def test_the_text_is_emitted_exactly_once(log: DenseLog) -> None:
    tree = StaticTree(depth=4, top_k=3, num_tokens=9)
    for found in replay(log, [Policy(shape=shape) for shape in (tree, Chain(), RootOnly())]):
        emitted = np.bincount(found.request, found.emitted)
        assert emitted.tolist() == found.positions.num_tokens.tolist() == [128, 128]
        assert found.is_last.sum() == found.positions.num_requests
    assert found.visited.all()  # by plain decoding
    assert (set(found.outcomes.verified), set(found.outcomes.levels)) == ({1}, {0})


def test_threads_and_chunks_change_nothing(log: DenseLog, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = StaticTree(depth=4, top_k=3, num_tokens=9), Chain(), ASKING["midpoint"]
    policies = [Policy(shape=shape) for shape in shapes]
    whole = replay(log, policies)
    monkeypatch.setattr(tree_log, "CHUNK_NODES", 1000)  # a chunk a request
    monkeypatch.setattr(progress, "_num_threads", 2)
    for one, two in zip(whole, replay(log, policies), strict=True):
        assert counted(one) == counted(two)
        assert one.request.tolist() == two.request.tolist()
        assert one.positions.row_prompts.tolist() == two.positions.row_prompts.tolist()


def shallower(chunk: LogChunk, depth: int) -> LogChunk:
    """The chunk as if only `depth` levels had been logged."""
    level, parents = torch.full((chunk.num_nodes,), 0), chunk.root
    for below in range(1, 6):
        children = chunk.first_child[parents]
        parents = (children[children >= 0][:, None] + torch.arange(4)).flatten()
        level[parents] = below
    return replace(chunk, first_child=chunk.first_child.masked_fill(level >= depth, -1))


ASKING = {
    "static": StaticTree(depth=5, top_k=4, num_tokens=12),
    "midpoint": EntropyStop(window=5, min_samples=1),
    "rejected": EntropyStop(window=5, min_samples=1, between="rejected"),
    "tree": EntropyStop(window=5, min_samples=1, top_k=2, num_tokens=9),
}


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("depth", [1, 4])
def test_bounds_hold_whatever_the_log_lacks(log: DenseLog, name: str, depth: int) -> None:
    [chunk] = log.chunks()
    whole, part = (
        replay_chunk(Policy(shape=ASKING[name]), of) for of in (chunk, shallower(chunk, depth))
    )
    assert part.outcomes.missing.any()
    for figure, weights in (("calls", None), ("verified", whole.outcomes.verified)):
        low, high = (getattr(part.bounds, f"{figure}_{end}") for end in ("low", "high"))
        truth = np.bincount(whole.request, weights)
        assert (low > 1).all()
        assert (low <= truth).all()
        assert (truth <= high).all()
        assert (low < high).any()
    policy = Policy(shape=ASKING[name])
    held, ranged = (
        score([name], [policy], [sums_to_score(run)])[0].pooled for run in (whole, part)
    )
    bound = held.bounds["mean_acceptance_length"]
    assert (bound.low, bound.high) == pytest.approx((held.tau.value,) * 2), "one formula"
    bound = ranged.bounds["mean_acceptance_length"]
    assert bound.low <= held.tau.value <= bound.high


def test_a_policy_wider_than_the_log_is_marked(log: DenseLog) -> None:
    [found] = replay(log, [Policy(shape=StaticTree(depth=3, top_k=6, num_tokens=12))])
    assert (found.outcomes.missing == found.outcomes.wanted).all()
    assert (found.bounds.calls_low == 128 / 4).all()  # rounds that accept three, or nothing
    assert (found.bounds.calls_high == 128).all()


NARROW = {
    "chain": Chain(num_draft_tokens=5),
    "stop": SignalStop(signal="confidence", threshold=0.2, window=5),
}


@pytest.mark.parametrize("name", NARROW)
def test_the_narrow_frontier_of_an_unnested_log_is_missed(tmp_path: Path, name: str) -> None:
    policy = Policy(shape=NARROW[name])
    [nested] = replay(random_log(tmp_path / "a", depth=5, top_k=3), [policy])
    [plain] = replay(random_log(tmp_path / "b", depth=5, top_k=3, nested=False), [policy])
    assert nested.outcomes.missing.sum() == 0
    assert plain.outcomes.missing.sum() > 0
    assert (plain.bounds.verified_low < plain.bounds.verified_high).any()
    # Nothing is lost above the missing node, so the bounds stay within a few rounds.
    assert (plain.bounds.calls_high - plain.bounds.calls_low <= 0.1 * 128).all()


def test_a_lossy_policy_is_refused(log: DenseLog) -> None:
    with pytest.raises(UsageError, match="lossless"):
        replay(log, [Policy(shape=Chain(), acceptance=Mars())])


def test_what_replay_cannot_tell_of_it_is_refused(log: DenseLog) -> None:
    record = EntropyStop(window=5)
    shared = Policy(shape=record, budget=SurvivalBudget(max_tokens=9))
    with pytest.raises(UsageError, match="learns from what the budget lets it verify"):
        submissions_of(log, [shared])


def test_the_full_tree_submits_the_whole_log(traces: TraceSet, log: DenseLog) -> None:
    [found] = replay(log, [Policy(shape=FullTree(depth=5, top_k=4))])
    matched = np.concatenate([chunk.matched for chunk in log.chunks()])
    sizes = np.array([len(tree.parent) for trees in plain_trees(traces) for tree in trees])
    assert found.outcomes.verified.tolist() == sizes[found.visited].tolist()
    assert found.outcomes.accepted.tolist() == matched[found.visited].tolist()


@pytest.fixture(scope="module")
def plain_log(tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    """Without the narrow frontiers of static trees."""
    return random_log(tmp_path_factory.mktemp("log") / "log", depth=3, top_k=3, nested=False)


def tree(beta: float, **changes: object) -> Policy:
    fields = {"scorer": random_network(8), "depth": 3, "first_top_k": 3, "second_top_k": 3}
    return Policy(shape=ScoredTree(**{**fields, "beta": beta, **changes}))  # type: ignore[arg-type]


def test_a_beta_that_keeps_nothing_is_refused(plain_log: DenseLog) -> None:
    keeps, does_not = replay(plain_log, [tree(0.1), tree(1.0)])
    assert keeps.outcomes.verified.max() > 4
    assert set(does_not.outcomes.verified.tolist()) == {1}
    policies = [tree(0.1), tree(1.0)]
    both = score(["yes", "no"], policies, [sums_to_score(run) for run in (keeps, does_not)])
    check_keeps_something(policies[:1], both[:1])
    with pytest.raises(UsageError, match="beta 1 is reached by no node"):
        check_keeps_something(policies, both)


def test_a_frontier_of_its_own_meets_what_the_log_lacks(plain_log: DenseLog) -> None:
    """The least likely child is scored best; the log expands the three likeliest of nine."""
    least = steps("draft_logp", [-1.5], [0.9, 0.2])
    [run] = replay(plain_log, [tree(0.01, scorer=least, predicts="conditional")])
    assert run.outcomes.missing.any()
    assert (run.bounds.calls_low < run.bounds.calls_high).any()


CHAIN_LENGTHS = [(1, length, length + 1) for length in (1, 3, 5)]
TREE_SIZES = [(3, d, max(n, d + 1)) for d in (1, 2, 4, 5) for n in (2, 6, 17, 41)]


@pytest.mark.parametrize(("top_k", "depth", "num_tokens"), CHAIN_LENGTHS + TREE_SIZES)
def test_a_summary_scores_static_settings_as_replay_does(
    log: DenseLog, top_k: int, depth: int, num_tokens: int
) -> None:
    summary = summarise(log, top_k=top_k)
    [wanted] = replay(
        log, [Policy(shape=StaticTree(depth=depth, top_k=top_k, num_tokens=num_tokens))]
    )
    outcomes = static_outcomes(summary, depth, num_tokens)
    visited = walk(summary.positions, outcomes.accepted + 1)
    assert outcomes.accepted[visited].tolist() == wanted.outcomes.accepted.tolist()
    assert outcomes.verified[visited].tolist() == wanted.outcomes.verified.tolist()
