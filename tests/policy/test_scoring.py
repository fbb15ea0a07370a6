"""Scorers against tellings that a reader can follow."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from specctl.errors import UsageError
from specctl.policy import ScoredTree, TreesScorer, build_shape, scorers
from specctl.policy.scorers import BLOCK_ROWS, build_log_odds, highest_log_odds
from tests.policy.scorers import FEATURES, ffn_by_hand, leaning, random_network, random_trees, steps


def trees_by_hand(scorer: TreesScorer, row: list[float]) -> float:
    total = 0.0
    for node in scorer.roots:
        while scorer.feature[node] >= 0:
            goes_left = row[scorer.feature[node]] <= scorer.threshold[node]
            node = scorer.left[node] if goes_left else scorer.right[node]
        total += scorer.value[node]
    return total


@pytest.mark.parametrize("hidden", [2, 5, 48])
def test_network(hidden: int) -> None:
    scorer = random_network(hidden, hidden)
    x = np.random.default_rng(1).normal((-3, 2, 4), (3, 1, 3), (500, 3)).astype(np.float32)
    found = build_log_odds(scorer)(torch.from_numpy(x))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), ffn_by_hand(scorer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_trees", "num_leaves"), [(1, 1), (1, 2), (7, 12), (3, 31), (2, 63)])
def test_trees_go_left_on_the_threshold(num_trees: int, num_leaves: int) -> None:
    scorer = random_trees(num_leaves, num_trees, num_leaves)
    grid = np.random.default_rng(0).integers(-5, 6, (400, len(FEATURES))) / 4
    on_threshold = np.isin(grid, np.array(scorer.threshold)).any()
    assert on_threshold, "no value lies on a threshold"
    x = grid.astype(np.float32)
    found = build_log_odds(scorer)(torch.from_numpy(x))
    wanted = [trees_by_hand(scorer, row) for row in x.tolist()]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-5)


def test_trees_that_lean_to_one_side_are_walked_too() -> None:
    scorer, x = leaning(3, 63), np.linspace(-3, 3, 50, dtype=np.float32)[:, None]
    wanted = [trees_by_hand(scorer, row) for row in x.tolist()]
    found = build_log_odds(scorer)(torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_tables_take_steps_in_proportion_to_nodes() -> None:
    """Deep trees, each split once over all leaves on its left, took seconds of a first load."""

    def num_steps(num_leaves: int) -> int:
        count = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace if frame.f_code.co_filename == scorers.__file__ else None

        scorer = leaning(20, num_leaves)
        sys.settrace(trace)
        try:
            build_log_odds(scorer)
        finally:
            sys.settrace(None)
        return count

    assert num_steps(60) < 6 * num_steps(15)


def test_the_next_float_above_a_threshold_goes_right() -> None:
    scorer = steps("draft_logp", [-1.0], [0.25, 0.75])
    x = torch.tensor([[-1.0], [math.nextafter(-1.0, 0.0)], [np.nextafter(np.float32(-1), 0.0)]])
    assert build_log_odds(scorer)(x).sigmoid().tolist() == pytest.approx([0.25, 0.25, 0.75])


def test_blocks_do_not_show() -> None:
    scorer = random_trees(3, 4, 8)
    x = torch.randn(2 * BLOCK_ROWS + 5, len(FEATURES), generator=torch.manual_seed(0))
    score = build_log_odds(scorer)
    alone = torch.cat([score(x[row : row + 1]) for row in range(0, len(x), 97)])
    assert torch.equal(score(x)[::97], alone)
    assert score(x[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"left": (0, -1, -1)}, "after their parent"),
        ({"right": (3, -1, -1)}, "inside the arrays"),
        ({"feature": (1, -1, -1)}, "inside the arrays"),
        ({"feature": (-2, -1, -1)}, "inside the arrays"),
        ({"right": (1, -1, -1)}, "one root or one node's child"),
        ({"roots": (0, 1)}, "one root or one node's child"),
        ({"roots": (3,)}, "outside the arrays"),
        ({"value": (0.0, 0.5)}, "differ in length"),
    ],
)
def test_arrays_that_are_no_trees_are_refused(fields: dict[str, object], named: str) -> None:
    stump = steps("depth", [1.5], [0.2, 0.7]).model_dump()
    with pytest.raises(ValidationError, match=named):
        TreesScorer(**{**stump, **fields})


def test_trees_of_more_leaves_than_bits_are_refused() -> None:
    cuts = [float(cut) for cut in range(63)]
    assert steps("depth", cuts[1:], [0.5] * 63).num_leaves == (63,)
    with pytest.raises(ValidationError, match="a tree of more than 63 leaves"):
        steps("depth", cuts, [0.5] * 64)


def test_no_node_exceeds_the_highest_log_odds() -> None:
    scorer = random_trees(5, 2, 6)
    x = torch.randn(4000, len(FEATURES), generator=torch.manual_seed(0))
    assert float(build_log_odds(scorer)(x).max()) <= highest_log_odds(scorer) + 1e-6
    assert highest_log_odds(steps("depth", [1.5], [0.2, 0.7])) == pytest.approx(math.log(7 / 3))
    assert highest_log_odds(random_network(0)) == math.inf


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    network, stump = random_network(0), steps("depth", [1.5], [0.2, 0.7])
    decimals = ((network, ("mean", "scale", "b1", "w2", "b2")), (stump, ("threshold", "value")))
    for scorer, names in decimals:
        for name in names:
            fields = scorer.model_dump()
            fields[name] = (value, *fields[name][1:])
            with pytest.raises(ValidationError, match=name):
                type(scorer)(**fields)


@pytest.mark.parametrize("name", ["phi", "coin", "joint_prob "])
def test_features_that_nodes_do_not_have_are_refused(name: str) -> None:
    scorer = steps(name, [1.5], [0.2, 0.7])
    with pytest.raises(UsageError, match=f"'{name}'"):
        build_shape(ScoredTree(scorer=scorer, beta=0.1))


def test_a_beta_that_nothing_can_reach_is_refused() -> None:
    scorer = steps("depth", [1.5], [0.2, 0.7])
    build_shape(ScoredTree(scorer=scorer, beta=0.69))
    with pytest.raises(UsageError, match=r"beta 0\.71.*0\.7 as the highest possible"):
        build_shape(ScoredTree(scorer=scorer, beta=0.71))
