"""The summary scores every static setting exactly as replaying it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, StaticTree
from specctl.replay.rounds import replay
from specctl.replay.summary import (
    Summary,
    static_accepted,
    static_verified,
    summarise,
    threshold_accepted,
    threshold_verified,
)
from specctl.replay.walk import walk
from tests.replay.logs import plain_trees, random_log, random_traces, static_tree


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    return random_log(tmp_path_factory.mktemp("dense") / "traces", depth=5, top_k=4, seed=1)


@pytest.fixture(scope="module")
def summary(log: DenseLog) -> Summary:
    return summarise(log, top_k=3, num_kept=40)


@pytest.mark.parametrize("depth", [1, 2, 4, 5])
@pytest.mark.parametrize("num_tokens", [2, 6, 17, 41])
def test_static_trees(log: DenseLog, summary: Summary, depth: int, num_tokens: int) -> None:
    size = max(num_tokens, depth + 1)
    shape = StaticTree(depth=depth, top_k=3, num_tokens=size)
    [wanted] = replay(log, [Policy(shape=shape)])
    accepted = static_accepted(summary, depth, size)
    visited = walk(summary.positions, accepted + 1)
    assert accepted[visited].tolist() == wanted.outcomes.accepted.tolist()
    verified = static_verified(summary, depth, size)[visited]
    assert verified.tolist() == wanted.outcomes.verified.tolist()


def test_chains(log: DenseLog) -> None:
    chains = summarise(log, top_k=1)
    for length in (1, 3, 5):
        [wanted] = replay(log, [Policy(shape=Chain(num_draft_tokens=length))])
        accepted = static_accepted(chains, length, length + 1)
        assert accepted[walk(chains.positions, accepted + 1)].tolist() == (
            wanted.outcomes.accepted.tolist()
        )


def test_thresholds_against_the_plain_telling(tmp_path: Path) -> None:
    traces = random_traces(tmp_path / "traces", depth=4, top_k=3, seed=2)
    summary = summarise(DenseLog.open(traces), top_k=3, num_kept=200)
    trees = [tree for request in plain_trees(traces) for tree in request]
    for depth, bound in ((2, -1.0), (4, -3.0), (4, -99.0)):
        pools = [static_tree(tree, depth, 3, 999) for tree in trees]
        kept = [
            [n for n in pool if n == 0 or tree.joint[n] >= bound]
            for tree, pool in zip(trees, pools, strict=True)
        ]
        assert threshold_verified(summary, depth, bound).tolist() == [len(k) for k in kept]
        on_path = [
            min(sum(tree.on_path[n] for n in nodes) - 1, tree.remaining)
            for tree, nodes in zip(trees, kept, strict=True)
        ]
        assert threshold_accepted(summary, depth, bound).tolist() == on_path


def test_ranks_and_scores_of_the_path_are_monotone(summary: Summary) -> None:
    on_path = np.isfinite(summary.path_logp)
    both = on_path[:, 1:] & on_path[:, :-1]
    assert (on_path[:, 1:] <= on_path[:, :-1]).all()
    assert (summary.path_logp[:, 1:][both] <= summary.path_logp[:, :-1][both]).all()
    ranks = summary.path_rank[:, -1].astype(int)
    assert (np.diff(ranks, axis=1)[both] > 0).all()


def test_beyond_the_log_is_refused(log: DenseLog, summary: Summary) -> None:
    with pytest.raises(UsageError, match="deeper or wider"):
        summarise(log, top_k=5)
    with pytest.raises(UsageError, match="deeper or wider"):
        summarise(log, top_k=2, depth=6)
    with pytest.raises(UsageError, match="depth 1 to 5"):
        static_accepted(summary, 6, 42)
    short = summarise(log, top_k=3, num_kept=8)
    with pytest.raises(UsageError, match="at most 8 nodes"):
        threshold_verified(short, 5, -99.0)
