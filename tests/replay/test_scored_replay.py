"""Replay of scored trees: what is unknown is counted, and a beta that keeps nothing refused."""

from __future__ import annotations

import pytest

from specctl.errors import UsageError
from specctl.logs.tree_log import DenseLog
from specctl.policy import Policy, ScoredTree
from specctl.replay.outcomes import is_ranked, needs_entropy
from specctl.replay.rounds import replay
from specctl.replay.run import refuse_in_vain
from tests.policy.scorers import SCORED, random_network, steps
from tests.replay.logs import random_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DenseLog:
    return random_log(tmp_path_factory.mktemp("log") / "log", depth=3, top_k=3, nested=False)


def tree(beta: float, **changes: object) -> Policy:
    fields = {"scorer": random_network(8), "depth": 3, "first_top_k": 3, "second_top_k": 3}
    return Policy(shape=ScoredTree(**{**fields, "beta": beta, **changes}))  # type: ignore[arg-type]


def test_a_beta_that_keeps_nothing_is_refused(log: DenseLog) -> None:
    keeps, does_not = replay(log, [tree(0.1), tree(1.0)])
    assert keeps.outcomes.verified.max() > 4
    assert set(does_not.outcomes.verified.tolist()) == {1}
    refuse_in_vain([keeps])
    with pytest.raises(UsageError, match=r"beta 1: .* found no node in \d+ rounds"):
        refuse_in_vain([keeps, does_not])


def test_a_frontier_of_its_own_meets_what_the_log_lacks(log: DenseLog) -> None:
    """The least likely child is scored best; the log expands the three likeliest of nine."""
    least = steps("draft_logp", [-1.5], [0.9, 0.2])
    [run] = replay(log, [tree(0.01, scorer=least, predicts="conditional")])
    assert run.outcomes.missing.any()
    assert (run.bounds.calls_low < run.bounds.calls_high).any()


def test_bounds_are_close_for_chains_alone() -> None:
    assert [name for name, shape in SCORED.items() if is_ranked(shape)] == ["c2t chain"]
    assert all(needs_entropy(Policy(shape=shape)) for shape in SCORED.values())
