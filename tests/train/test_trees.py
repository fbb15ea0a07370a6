"""Boosted trees: what LightGBM says is what the flat arrays say, bit for bit in their decisions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from specctl.logs.node_sample import NodeRows
from specctl.policy import TreesScorer
from specctl.policy.scorers import build_log_odds
from specctl.train.configs import TreesConfig
from specctl.train.gbdt import boost, feature_gains, on_grid, parameters, trees_scorer

NAMES = ("draft_logp", "parent_entropy", "depth")
CONFIG = TreesConfig(num_trees=30, num_leaves=12, min_rows=20)


def rows_of(seed: int, size: int = 6000) -> NodeRows:
    """Acceptance rises with the first feature, bends with the second, ignores the third."""
    draws = np.random.default_rng(seed)
    x = np.stack(
        [-draws.gamma(1.0, 2.0, size), draws.gamma(2, 1, size), draws.integers(1, 9, size)]
    )
    logit = 2 + 1.5 * x[0] - 0.6 * (x[1] > 2) * x[1]
    return NodeRows(
        features=np.ascontiguousarray(x.T, np.float32),
        accepted=draws.random(size) < 1 / (1 + np.exp(-logit)),
        depth=x[2].astype(np.int32),
        prompt=(np.arange(size) % 40).astype(np.int32),
        category=np.zeros(size, np.int32),
        prompt_ids=tuple(f"p{i}" for i in range(40)),
        categories=("code",),
        num_positives=1,
        num_negatives=1,
        num_unknown=0,
        kept_frac=1.0,
    )


def boosted(rows: NodeRows, config: TreesConfig = CONFIG) -> Any:
    return boost(rows, rows.prompt % 4 == 0, NAMES, config)


@pytest.fixture(scope="module")
def booster() -> Any:
    return boosted(rows_of(0))


def said(scorer: TreesScorer, x: np.ndarray) -> np.ndarray:
    return build_log_odds(scorer)(torch.from_numpy(x)).numpy()


def probes(scorer: TreesScorer) -> np.ndarray:
    """Nodes never seen, and every threshold of every feature with its float32 neighbours."""
    x = rows_of(1).features
    cuts = np.float32([t for f, t in zip(scorer.feature, scorer.threshold, strict=True) if f >= 0])
    around = [cuts, np.nextafter(cuts, np.float32(-np.inf)), np.nextafter(cuts, np.float32(np.inf))]
    edges = np.tile(x[: len(cuts)], (9, 1))
    for number, (feature, values) in enumerate(itertools.product(range(3), around)):
        edges[number * len(cuts) : (number + 1) * len(cuts), feature] = values
    return np.concatenate([x, edges])


def test_trees_equal_lightgbm_on_every_probe(booster: Any) -> None:
    """Leaves are rounded to a grid of some 2^-20, 30 of them are added; a wrong leaf is off by
    more than a thousand times that."""
    scorer = trees_scorer(booster, NAMES)
    x = probes(scorer)
    wanted = booster.predict(x, raw_score=True, num_iteration=booster.best_iteration)
    np.testing.assert_allclose(said(scorer, x), wanted, rtol=0, atol=5e-5)
    assert len(scorer.roots) == booster.best_iteration > 5
    assert set(scorer.num_leaves) <= set(range(2, 13))


def test_sums_are_exact_in_any_order(booster: Any) -> None:
    scorer = trees_scorer(booster, NAMES)
    x = torch.from_numpy(rows_of(1).features)
    rule = build_log_odds(scorer)
    values = rule.value[rule.leaves(x)]  # type: ignore[attr-defined]
    assert torch.equal(values.sum(1).double(), values.double().sum(1))
    assert torch.equal(values.flip(1).cumsum(1)[:, -1], values.cumsum(1)[:, -1])


def test_grid_is_fine_and_covers_the_sum() -> None:
    value = np.array([0.1, -3.7, 2.2, 1e-9, 5.5])
    rounded = on_grid(value, [0, 2])
    np.testing.assert_allclose(rounded, value, atol=2.0**-20)
    assert (rounded * 2.0**19 == np.round(rounded * 2.0**19)).all()
    assert on_grid(np.zeros(2), [0, 1]).tolist() == [0.0, 0.0]


def test_what_sampling_left_out_is_added_once(booster: Any) -> None:
    x = rows_of(1).features
    plain, corrected = (said(trees_scorer(booster, NAMES, kept), x) for kept in (0.0, -2.5))
    np.testing.assert_allclose(corrected, plain - 2.5, atol=5e-5)


def test_same_seed_same_trees(booster: Any) -> None:
    again = boosted(rows_of(0), CONFIG.model_copy(update={"threads": 2}))
    assert trees_scorer(again, NAMES) == trees_scorer(booster, NAMES)


def test_boosting_stops_on_the_validation_rows(booster: Any) -> None:
    longer = boosted(rows_of(0), CONFIG.model_copy(update={"num_trees": 400, "patience": 3}))
    assert longer.best_iteration < 200
    losses = next(iter(longer.best_score.values()))
    assert losses["binary_logloss"] <= next(iter(booster.best_score.values()))["binary_logloss"]


def test_acceptance_never_falls_where_the_drafter_is_surer(booster: Any) -> None:
    """The unconstrained trees do fall somewhere, so the test can tell."""
    x = np.repeat(rows_of(2).features[:200], 60, 0)
    x[:, 0] = np.tile(np.linspace(-12, 0, 60), 200)
    free = boosted(rows_of(0), CONFIG.model_copy(update={"monotone": False}))
    falls = [
        np.diff(said(trees_scorer(trained, NAMES), x).reshape(200, 60), axis=1).min()
        for trained in (booster, free)
    ]
    assert falls[0] >= 0
    assert falls[1] < -0.01


def test_constraints_and_gains_by_name(booster: Any) -> None:
    names = ("depth", "sibling_rank", "joint_prob")
    assert parameters(names, CONFIG)["monotone_constraints"] == [0, -1, 1]
    assert "monotone_constraints" not in parameters(("depth",), CONFIG)
    gains = feature_gains(booster, NAMES)
    assert sum(gains.values()) == pytest.approx(1.0)
    assert gains["draft_logp"] > gains["parent_entropy"] > gains["depth"]
