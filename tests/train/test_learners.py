"""The network: what it learns, says and refuses."""

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
from specctl.train import c2t
from specctl.train.c2t import train_ffn
from specctl.train.configs import FfnConfig

QUICK = FfnConfig(hidden=8, epochs=4, min_steps=1, batch_size=512, lr=1e-2)
Rows = tuple[Singles, Bools]


def rare_nodes(size: int, seed: int = 0) -> Rows:
    """About 4 % accepted, by a logistic law of two features."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(size, 2)).astype(np.float32) * [2.0, 0.5] + [-3.0, 4.0]
    odds = features[:, 0] - (features[:, 1] - 4.0) - 1.5
    return features.astype(np.float32), random.random(size) < 1 / (1 + np.exp(-odds))


def network(rows: Rows, log_kept: float = 0.0, **changes: Any) -> FfnScorer:
    """A quick fit of two features; `changes` are of its configuration."""
    config = QUICK.model_copy(update=changes)
    return train_ffn(*rows, ("draft_logp", "depth"), config, log_kept=log_kept)


def probs(scorer: FfnScorer, features: Singles) -> Singles:
    with torch.inference_mode():
        return build_log_odds(scorer)(torch.from_numpy(features)).sigmoid().numpy()


def test_offset_undoes_the_sampling_of_negatives() -> None:
    """Kept at r = 1/20, a network speaks of odds 20 times too high unless log r is added."""
    features, accepted = rare_nodes(100_000)
    kept = accepted | (np.random.default_rng(1).random(len(accepted)) < 0.05)
    rows, frac = (features[kept], accepted[kept]), (kept & ~accepted).sum() / (~accepted).sum()
    scorer = network(rows, float(np.log(frac)), min_steps=1500)
    unseen, labels = rare_nodes(40_000, seed=2)
    found = probs(scorer, unseen)
    assert found.mean() == pytest.approx(labels.mean(), rel=0.1)
    certain = found > 0.5
    assert labels[certain].mean() == pytest.approx(found[certain].mean(), abs=0.05)
    naive = network(rows, min_steps=1500)
    assert probs(naive, unseen).mean() > 2 * labels.mean()
    bias = np.float32(naive.b2[0]) + np.float32(np.log(frac))
    assert scorer.b2[0] == pytest.approx(float(bias), abs=1e-5)


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
    with pytest.raises(UsageError, match=r"diverged.*lower --lr"):
        network((features, accepted))


def test_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, used = torch.get_num_threads(), []
    monkeypatch.setattr(c2t, "_descend", lambda *_: used.append(torch.get_num_threads()))
    network(rare_nodes(600), threads=before + 1)
    assert used == [before + 1]
    assert torch.get_num_threads() == before
