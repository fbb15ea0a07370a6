"""The summary scores every static setting exactly as replaying it does."""

from __future__ import annotations

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, Policy, StaticTree
from specctl.replay.rounds import replay
from specctl.replay.summary import NOT_THERE, Summary, static_accepted, static_verified, summarise
from specctl.replay.walk import walk
from tests.replay.logs import random_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    return random_log(tmp_path_factory.mktemp("dense") / "traces", depth=5, top_k=4, seed=1)


@pytest.fixture(scope="module")
def summary(log: DenseLog) -> Summary:
    return summarise(log, top_k=3)


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


def test_ranks_rise_along_the_path(summary: Summary) -> None:
    ranks = summary.path_rank[:, -1].astype(int)
    on_path = ranks != NOT_THERE
    both = on_path[:, 1:] & on_path[:, :-1]
    assert both.any()
    assert (on_path[:, 1:] <= on_path[:, :-1]).all()
    assert (np.diff(ranks, axis=1)[both] > 0).all()


def test_beyond_the_log_is_refused(log: DenseLog, summary: Summary) -> None:
    with pytest.raises(UsageError, match="deeper or wider"):
        summarise(log, top_k=5)
    with pytest.raises(UsageError, match="deeper or wider"):
        summarise(log, top_k=2, depth=6)
    with pytest.raises(UsageError, match="depth 1 to 5"):
        static_accepted(summary, 6, 42)
