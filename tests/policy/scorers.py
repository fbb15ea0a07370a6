"""Scorers for tests: step functions that a reader can follow, and random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from specctl.features import SUFFIX_TOKENS
from specctl.policy import AcceptanceTable, FfnScorer, Policy, ScoredTree

FEATURES = ("joint_logp", "parent_entropy", "depth")


STEEPNESS = 64.0
"""Of a step: it rises within 1/64 of the feature's unit."""


def steps(feature: str, cuts: Sequence[float], probs: Sequence[float]) -> FfnScorer:
    """A staircase: `probs[i]` where i cuts lie below the feature's value, each step two units."""
    odds = [math.log(p / (1 - p)) for p in probs]
    rises = [after - before for before, after in pairwise(odds)]
    return FfnScorer(
        features=(feature,),
        mean=(0.0,),
        scale=(1.0,),
        w1=((STEEPNESS,),) * (2 * len(cuts)),
        b1=tuple(-STEEPNESS * cut - edge for cut in cuts for edge in (0.0, 1.0)),
        w2=tuple(sign * rise for rise in rises for sign in (1.0, -1.0)),
        b2=(odds[0],),
    )


def random_network(seed: int, hidden: int = 8) -> FfnScorer:
    """Scores that fall with the drafter's doubt and with depth, more or less."""
    draws = np.random.default_rng(seed)
    w1 = 0.25 * draws.normal(size=(hidden, len(FEATURES))) + (0.6, -0.3, -0.3)
    w2 = 10 / hidden * abs(draws.normal(size=hidden))
    return FfnScorer(
        features=FEATURES,
        mean=(-2.0, 1.5, 2.5),
        scale=(1.5, 0.6, 1.2),
        w1=tuple(tuple(row) for row in w1.tolist()),
        b1=tuple(draws.normal(size=hidden).tolist()),
        w2=tuple(w2.tolist()),
        b2=(-1.0,),
    )


def copy_table() -> AcceptanceTable:
    """Copies are accepted more often than the drafter says, what leaves one less often."""
    edges = (-4.0, -2.0, -1.0, -0.4, -0.1)
    probs = np.array([0.01, 0.08, 0.25, 0.5, 0.75, 0.95])
    copied = np.arange(-SUFFIX_TOKENS, SUFFIX_TOKENS + 1)[:, None]
    log_odds = np.log(probs / (1 - probs)) + 0.5 * copied
    return AcceptanceTable(edges=edges, log_odds=tuple(map(tuple, log_odds.tolist())))


def token_steps(cuts: Sequence[float], probs: Sequence[float]) -> AcceptanceTable:
    """A staircase over the drafter's probability alone, exact: equal scores stay equal."""
    odds = tuple(math.log(p / (1 - p)) for p in probs)
    return AcceptanceTable(edges=tuple(cuts), log_odds=(odds,) * (2 * SUFFIX_TOKENS + 1))


BY_TOKEN = token_steps([-3.0, -1.5, -0.6, -0.2], [0.03, 0.2, 0.45, 0.7, 0.9])
SCORED = {
    "c2t joint": ScoredTree(
        scorer=random_network(8), beta=0.5, depth=5, first_top_k=5, second_top_k=3
    ),
    "c2t conditional": ScoredTree(
        scorer=BY_TOKEN,
        predicts="conditional",
        beta=0.1,
        depth=7,
        first_top_k=5,
        second_top_k=3,
        num_tokens=14,
    ),
    "c2t as printed": ScoredTree(
        scorer=random_network(6),
        beta=0.5,
        depth=5,
        first_top_k=5,
        second_top_k=3,
        keep_leaves=False,
    ),
    "c2t chain": ScoredTree(
        scorer=BY_TOKEN, predicts="conditional", beta=0.3, depth=8, first_top_k=1, second_top_k=1
    ),
    "survival": ScoredTree(
        scorer=copy_table(),
        predicts="conditional",
        beta=0.08,
        depth=7,
        first_top_k=5,
        second_top_k=5,
        min_level_prob=0.4,
    ),
}
SCORED_POLICIES = {name: Policy(shape=shape) for name, shape in SCORED.items()}
"""Trees and chains whose sizes differ between rounds of the embedded pair, and whose frontiers its
logs hold: a log is of the likeliest nodes by joint probability."""


def ffn_by_hand(scorer: FfnScorer, x: np.ndarray) -> np.ndarray:
    """Standardise, one hidden layer, one number; float64."""
    standard = (x.astype(np.float64) - np.array(scorer.mean)) / np.array(scorer.scale)
    hidden = np.maximum(standard @ np.array(scorer.w1).T + np.array(scorer.b1), 0)
    return hidden @ np.array(scorer.w2) + scorer.b2[0]
