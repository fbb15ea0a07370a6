"""The network: what it learns, from what share of the negatives, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specctl.errors import UsageError
from specctl.logs.node_sample import Singles
from specctl.logs.positions import Bools
from specctl.policy import FfnScorer
from specctl.policy.scorers import build_log_odds
from specctl.train.c2t import train_ffn
from specctl.train.configs import FfnConfig

NAMES = ("draft_logp", "depth")
QUICK = FfnConfig(hidden=8, epochs=4, min_steps=1, batch_size=512, lr=1e-2)


def rare_nodes(size: int, seed: int = 0) -> tuple[Singles, Bools]:
    """About 4 % accepted, by a logistic law of two features."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(size, 2)).astype(np.float32) * [2.0, 0.5] + [-3.0, 4.0]
    odds = features[:, 0] - (features[:, 1] - 4.0) - 1.5
    return features.astype(np.float32), random.random(size) < 1 / (1 + np.exp(-odds))


def probs(scorer: FfnScorer, features: Singles) -> Singles:
    with torch.inference_mode():
        found: Singles = build_log_odds(scorer)(torch.from_numpy(features)).sigmoid().numpy()
    return found


def test_offset_undoes_the_sampling_of_negatives() -> None:
    """Kept at r = 1/20, a network speaks of odds 20 times too high unless log r is added.

    Power: the mean of 40,000 labels at 4 % has a standard error of 2.5 % of itself; bounds are
    10 %, the error without the offset is 700 %, and with its sign turned it is 95 % down.
    """
    features, accepted = rare_nodes(100_000)
    kept = accepted | (np.random.default_rng(1).random(len(accepted)) < 0.05)
    frac = (kept & ~accepted).sum() / (~accepted).sum()
    config = QUICK.model_copy(update={"min_steps": 1500})
    rows = (features[kept], accepted[kept], NAMES, config)
    scorer = train_ffn(*rows, log_kept=float(np.log(frac)))
    unseen, labels = rare_nodes(40_000, seed=2)
    found = probs(scorer, unseen)
    assert found.mean() == pytest.approx(labels.mean(), rel=0.1)
    certain = found > 0.5
    assert labels[certain].mean() == pytest.approx(found[certain].mean(), abs=0.05)
    naive = train_ffn(*rows)
    assert probs(naive, unseen).mean() > 2 * labels.mean()
    bias = np.float32(naive.b2[0]) + np.float32(np.log(frac))
    assert scorer.b2[0] == pytest.approx(float(bias), abs=1e-5)


def test_same_seed_same_weights() -> None:
    features, accepted = rare_nodes(2000)
    first, again = (train_ffn(features, accepted, NAMES, QUICK) for _ in range(2))
    assert first == again
    other = train_ffn(features, accepted, NAMES, QUICK.model_copy(update={"seed": 1}))
    assert other != first


def test_fine_tuning_starts_where_the_other_ended() -> None:
    features, accepted = rare_nodes(20_000)
    start = train_ffn(features, accepted, NAMES, QUICK, log_kept=-1.0)
    still = QUICK.model_copy(update={"lr": 1e-12, "epochs": 1, "hidden": 48})
    tuned = train_ffn(features[:600], accepted[:600], NAMES, still, log_kept=-2.0, start=start)
    assert (tuned.mean, tuned.scale, tuned.w1) == (start.mean, start.scale, start.w1)
    assert tuned.b2[0] == pytest.approx(start.b2[0], abs=1e-5)


def test_few_rows_are_passed_over_more_often() -> None:
    config = FfnConfig(epochs=10, min_steps=1000, batch_size=100)
    assert config.num_epochs(10_000) == 10
    assert config.num_epochs(1_000) == 100
    assert config.num_epochs(50) == 1000
    seen: list[int] = []
    features, accepted = rare_nodes(600)
    steps = QUICK.model_copy(update={"min_steps": 11})
    train_ffn(features, accepted, NAMES, steps, on_epoch=seen.append)
    assert sum(seen) == 6


@pytest.mark.parametrize("hidden", [2, 48])
def test_sizes_offered_and_a_constant_feature(hidden: int) -> None:
    features, accepted = rare_nodes(2000)
    features[:, 1] = 7.0
    scorer = train_ffn(features, accepted, NAMES, QUICK.model_copy(update={"hidden": hidden}))
    assert (len(scorer.b1), len(scorer.w1[0]), scorer.scale[1]) == (hidden, 2, 1.0)
    assert np.isfinite(probs(scorer, features)).all()


def test_divergence_is_refused() -> None:
    features, accepted = rare_nodes(600)
    features[3, 0] = np.nan
    with pytest.raises(UsageError, match=r"expected finite weights, .*lower --lr"):
        train_ffn(features, accepted, NAMES, QUICK)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    features, accepted = rare_nodes(600)
    used: list[Any] = []
    config = QUICK.model_copy(update={"threads": before + 1, "epochs": 1})
    train_ffn(
        features, accepted, NAMES, config, on_epoch=lambda _: used.append(torch.get_num_threads())
    )
    assert used == [before + 1]
    assert torch.get_num_threads() == before
