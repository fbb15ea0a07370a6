"""Scorers for tests: step functions that a reader can follow, and random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specctl.features import SUFFIX_TOKENS
from specctl.policy import AcceptanceTable, FfnScorer, Policy, ScoredTree, TreesScorer

FEATURES = ("joint_logp", "parent_entropy", "depth")


def steps(feature: str, cuts: Sequence[float], probs: Sequence[float]) -> TreesScorer:
    """One tree: `probs[i]` where i cuts lie below the feature's value."""
    size = len(cuts)
    odds = [math.log(p / (1 - p)) for p in probs]
    return TreesScorer(
        features=(feature,),
        roots=(0,),
        feature=(0,) * size + (-1,) * (size + 1),
        threshold=(*cuts, *(0.0,) * (size + 1)),
        left=(*range(size, 2 * size), *(-1,) * (size + 1)),
        right=(*range(1, size), 2 * size, *(-1,) * (size + 1)),
        value=(*(0.0,) * size, *odds),
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


def random_trees(seed: int, num_trees: int, num_leaves: int) -> TreesScorer:
    """Trees that split a random leaf at a time, on a grid of thresholds that data can hit."""
    draws = np.random.default_rng(seed)
    rows: list[list[float]] = []  # feature, threshold, left, right, value
    roots = []
    for _ in range(num_trees):
        roots.append(len(rows))
        rows.append([-1, 0, -1, -1, draws.normal()])
        leaves = [roots[-1]]
        while len(leaves) < num_leaves:
            leaf = leaves.pop(draws.integers(len(leaves)))
            children = [len(rows), len(rows) + 1]
            rows[leaf] = [draws.integers(len(FEATURES)), draws.integers(-4, 4) / 4, *children, 0.0]
            rows += [[-1, 0, -1, -1, draws.normal()] for _ in children]
            leaves += children
    feature, threshold, left, right, value = zip(*rows, strict=True)
    return TreesScorer(
        features=FEATURES,
        roots=tuple(roots),
        feature=tuple(int(f) for f in feature),
        threshold=tuple(map(float, threshold)),
        left=tuple(map(int, left)),
        right=tuple(map(int, right)),
        value=tuple(map(float, value)),
    )


def copy_table() -> AcceptanceTable:
    """Copies are accepted more often than the drafter says, what leaves one less often."""
    edges = (-4.0, -2.0, -1.0, -0.4, -0.1)
    probs = np.array([0.01, 0.08, 0.25, 0.5, 0.75, 0.95])
    copied = np.arange(-SUFFIX_TOKENS, SUFFIX_TOKENS + 1)[:, None]
    log_odds = np.log(probs / (1 - probs)) + 0.5 * copied
    return AcceptanceTable(edges=edges, log_odds=tuple(map(tuple, log_odds.tolist())))


BY_TOKEN = steps("draft_logp", [-3.0, -1.5, -0.6, -0.2], [0.03, 0.2, 0.45, 0.7, 0.9])
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


def leaning(num_trees: int, num_leaves: int) -> TreesScorer:
    """Trees as deep as they have leaves, all of them on the left of the root."""
    inner, size = num_leaves - 1, 2 * num_leaves - 1
    starts = range(0, num_trees * size, size)
    values = np.random.default_rng(0).normal(0, 1024, (num_trees, size)).round() / 1024
    below = [i + 1 for i in range(inner)]
    beside = [inner + 1 + i for i in range(inner)]
    none = [-1] * num_leaves
    return TreesScorer(
        features=("joint_prob",),
        roots=tuple(starts),
        feature=(*[0] * inner, *none) * num_trees,
        threshold=tuple(values.ravel().tolist()),
        left=tuple(v for at in starts for v in (*(at + i for i in below), *none)),
        right=tuple(v for at in starts for v in (*(at + i for i in beside), *none)),
        value=tuple(values.ravel().tolist()),
    )
