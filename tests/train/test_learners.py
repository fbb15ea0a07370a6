"""Boosted trees and the network: what they learn, what they say, what they refuse."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from specctl.errors import UsageError
from specctl.logs.node_sample import NodeRows, Singles
from specctl.logs.positions import Bools
from specctl.policy import FfnScorer, TreesScorer
from specctl.policy.scorers import build_log_odds
from specctl.train.c2t import train_ffn
from specctl.train.configs import FfnConfig, TreesConfig
from specctl.train.gbdt import boost, feature_gains, parameters, trees_scorer

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
        prompt=(np.arange(size) % 40).astype(np.int32),
        prompt_ids=tuple(f"p{i}" for i in range(40)),
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


QUICK = FfnConfig(hidden=8, epochs=4, min_steps=1, batch_size=512, lr=1e-2)
Rows = tuple[Singles, Bools]


def rare_nodes(size: int, seed: int = 0) -> Rows:
    """About 4 % accepted, by a logistic law of two features."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(size, 2)).astype(np.float32) * [2.0, 0.5] + [-3.0, 4.0]
    odds = features[:, 0] - (features[:, 1] - 4.0) - 1.5
    return features.astype(np.float32), random.random(size) < 1 / (1 + np.exp(-odds))


def network(rows: Rows, given: dict[str, Any] | None = None, **changes: Any) -> FfnScorer:
    """A quick fit of two features; `changes` are of its configuration."""
    config = QUICK.model_copy(update=changes)
    return train_ffn(*rows, ("draft_logp", "depth"), config, **(given or {}))


def probs(scorer: FfnScorer, features: Singles) -> Singles:
    with torch.inference_mode():
        return build_log_odds(scorer)(torch.from_numpy(features)).sigmoid().numpy()


def test_offset_undoes_the_sampling_of_negatives() -> None:
    """Kept at r = 1/20, a network speaks of odds 20 times too high unless log r is added."""
    features, accepted = rare_nodes(100_000)
    kept = accepted | (np.random.default_rng(1).random(len(accepted)) < 0.05)
    rows, frac = (features[kept], accepted[kept]), (kept & ~accepted).sum() / (~accepted).sum()
    scorer = network(rows, {"log_kept": float(np.log(frac))}, min_steps=1500)
    unseen, labels = rare_nodes(40_000, seed=2)
    found = probs(scorer, unseen)
    assert found.mean() == pytest.approx(labels.mean(), rel=0.1)
    certain = found > 0.5
    assert labels[certain].mean() == pytest.approx(found[certain].mean(), abs=0.05)
    naive = network(rows, min_steps=1500)
    assert probs(naive, unseen).mean() > 2 * labels.mean()
    bias = np.float32(naive.b2[0]) + np.float32(np.log(frac))
    assert scorer.b2[0] == pytest.approx(float(bias), abs=1e-5)


def test_fine_tuning_starts_where_the_other_ended() -> None:
    features, accepted = rare_nodes(20_000)
    start = network((features, accepted), {"log_kept": -1.0})
    still = {"lr": 1e-12, "epochs": 1, "hidden": 48}
    given = {"log_kept": -2.0, "start": start}
    tuned = network((features[:600], accepted[:600]), given, **still)
    assert (tuned.mean, tuned.scale, tuned.w1) == (start.mean, start.scale, start.w1)
    assert tuned.b2[0] == pytest.approx(start.b2[0], abs=1e-5)


def test_few_rows_are_passed_over_more_often() -> None:
    config = FfnConfig(epochs=10, min_steps=1000, batch_size=100)
    assert [config.num_epochs(n) for n in (10_000, 1_000, 50)] == [10, 100, 1000]
    seen: list[int] = []
    network(rare_nodes(600), {"on_epoch": seen.append}, min_steps=11)
    assert sum(seen) == 6


@pytest.mark.parametrize("hidden", [2, 48])
def test_sizes_offered_and_a_constant_feature(hidden: int) -> None:
    features, accepted = rare_nodes(2000)
    features[:, 1] = 7.0
    scorer = network((features, accepted), hidden=hidden)
    assert (len(scorer.b1), len(scorer.w1[0]), scorer.scale[1]) == (hidden, 2, 1.0)
    assert np.isfinite(probs(scorer, features)).all()


def test_divergence_is_refused() -> None:
    features, accepted = rare_nodes(600)
    features[3, 0] = np.nan
    with pytest.raises(UsageError, match=r"expected finite weights, .*lower --lr"):
        network((features, accepted))


def test_threads_are_given_back() -> None:
    before, used = torch.get_num_threads(), []
    watch = {"on_epoch": lambda _: used.append(torch.get_num_threads())}
    network(rare_nodes(600), watch, threads=before + 1, epochs=1)
    assert used == [before + 1]
    assert torch.get_num_threads() == before
