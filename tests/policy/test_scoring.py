"""Scorers against tellings that a reader can follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specctl.errors import RecordError, UsageError
from specctl.policy import FfnScorer, ScoredTree, build_shape
from specctl.policy.scorers import build_log_odds, highest_log_odds
from tests.policy.scorers import copy_table, ffn_by_hand, random_network, steps


@pytest.mark.parametrize("hidden", [2, 5, 48])
def test_network(hidden: int) -> None:
    scorer = random_network(hidden, hidden)
    x = np.random.default_rng(1).normal((-3, 2, 4), (3, 1, 3), (500, 3)).astype(np.float32)
    found = build_log_odds(scorer)(torch.from_numpy(x))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), ffn_by_hand(scorer, x), rtol=1e-5, atol=1e-5)


def test_no_node_exceeds_the_highest_log_odds() -> None:
    table = copy_table()
    assert highest_log_odds(table) == pytest.approx(math.log(19) + 2)
    logp = -torch.rand(4000, generator=torch.manual_seed(0)) * 5
    x = torch.stack([logp, (torch.arange(4000) % 9 - 4.0)], 1)
    assert float(build_log_odds(table)(x).max()) <= highest_log_odds(table) + 1e-6
    assert highest_log_odds(random_network(0)) == math.inf


def test_a_number_beyond_float32_is_refused() -> None:
    fields = random_network(0).model_dump()
    fields["w2"] = (1e39, *fields["w2"][1:])
    with pytest.raises(RecordError, match=r"w2.* exceeds float32"):
        FfnScorer(**fields)


@pytest.mark.parametrize("name", ["phi", "coin", "joint_prob "])
def test_features_that_nodes_do_not_have_are_refused(name: str) -> None:
    scorer = steps(name, [1.5], [0.2, 0.7])
    with pytest.raises(UsageError, match=f"'{name}'"):
        build_shape(ScoredTree(scorer=scorer, beta=0.1))


def test_a_beta_that_nothing_can_reach_is_refused() -> None:
    highest = 1 / (1 + math.exp(-highest_log_odds(copy_table())))
    build_shape(ScoredTree(scorer=copy_table(), beta=highest - 1e-4))
    with pytest.raises(UsageError, match=r"beta 0\.993027.*0\.992927 as the highest"):
        build_shape(ScoredTree(scorer=copy_table(), beta=highest + 1e-4))
