"""Estimates of acceptance: one from what a drafter knows, one from what only an oracle knows.

**Features** (R_feat). A logistic and isotonic fit on training prompts, over what the drafter itself
can see.

**Oracle** (R_prob). What a node's acceptance probability would be to someone who knew the target's
law. Dense logs hold that law only below nodes of the accepted path, and which nodes those are is
the outcome itself: a decision that used the law where it is logged would look into the future.
Hence, at every node alike:

- sampled texts: at depth 1 the target's own probability, which is logged at every position and
  exact; deeper, a cross-fitted estimate.
- greedy texts: the target's law is 0 or 1, and knowing it is the clairvoyant. The estimate takes
  its place at every depth.

Cross-fitted: each prompt is estimated by a model that saw none of its nodes, and that was told how
sure the target is at the root. So the rung is an estimate of R_prob from below, wherever the model
is worse than the truth, and it is named as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specctl.errors import TraceError
from specctl.logs.node_table import NodeTable, SampledNodes
from specctl.logs.positions import Bools, Positions
from specctl.replay.calibrate import (
    Fit,
    Quality,
    Singles,
    check_labels,
    fit_boosted,
    fit_logistic,
    quality,
)

DRAFTER_FEATURES = ("log_odds", "entropy", "depth", "log_rank")
"""What a drafter knows of a node: log-odds of its probability (nats), full entropy of the
distribution that it comes from (nats), its depth, log of its 1-based rank among its siblings."""
ORACLE_FEATURES = (
    *DRAFTER_FEATURES,
    "topk_entropy",
    "joint_logp",
    "root_target_entropy",
    "root_target_margin",
)
"""The same with the path's log-probability and how sure the target is at the root: the entropy
and top-2 margin (nats) of the distribution that verifies depth 1, which no policy can know."""
LEAST_PROB = 1e-3
"""Below a node that is less likely accepted than this, none is considered: it would be drafted
and verified once in a thousand rounds' hope."""


class Estimate(Protocol):
    """Conditional acceptance of logged nodes."""

    def conditional(self, nodes: NodeTable, positions: Positions) -> Singles:
        """`[M]` float32 for nodes of a chunk, roots not among them."""
        ...


def joint_acceptance(
    estimate: Estimate, nodes: NodeTable, positions: Positions, wanted: Bools
) -> Singles:
    """`[M]` float32, conditionals multiplied from the root down; 1 at roots.

    In float32 the product with a number of at most 1 never grows, so no child outranks its
    parent. What is not wanted is 0, and so is what stands below an unlikely node (`LEAST_PROB`).

    Args:
        nodes: of a chunk, whole. wanted: `[M]`, closed under parents.
    """
    joint: Singles = (nodes.depth == 0).astype(np.float32)
    order = np.argsort(nodes.depth, kind="stable")
    ends = np.cumsum(np.bincount(nodes.depth))
    for start, end in pairwise(ends):
        level = order[start:end]
        level = level[wanted[level] & (joint[nodes.parent[level]] >= LEAST_PROB)]
        conditional = estimate.conditional(nodes.take(level), positions)
        joint[level] = joint[nodes.parent[level]] * conditional
    return joint


@dataclass(frozen=True)
class FeatureEstimate:
    """From `DRAFTER_FEATURES`."""

    fit: Fit

    def conditional(self, nodes: NodeTable, positions: Positions) -> Singles:
        del positions
        return self.fit.prob(nodes.features(DRAFTER_FEATURES))


@dataclass(frozen=True)
class OracleEstimate:
    """From `ORACLE_FEATURES`, each prompt by a model that never saw it.

    Attributes:
        fits: one a fold. fold_of: fold of each prompt.
        names: of `ORACLE_FEATURES`, those that the log holds.
        is_sampled: depth 1 takes the target's own probability.
    """

    fits: tuple[Fit, ...]
    fold_of: dict[str, int]
    names: tuple[str, ...]
    is_sampled: bool

    def conditional(self, nodes: NodeTable, positions: Positions) -> Singles:
        folds = np.array([self.fold_of[name] for name in positions.prompt_ids])
        fold = folds[positions.prompt][positions.request][nodes.row]
        return self.of_folds(nodes, fold)

    def of_folds(self, nodes: NodeTable, fold: NDArray[np.integer]) -> Singles:
        """`[M]`: the same, given each node's fold."""
        features, prob = nodes.features(self.names), np.ones(len(fold), np.float32)
        for index in np.unique(fold).tolist():
            prob[fold == index] = self.fits[index].prob(features[fold == index])
        return np.where(nodes.depth == 1, _root_law(nodes), prob) if self.is_sampled else prob


@dataclass(frozen=True)
class Estimates:
    """Both, and how good they are on the nodes of held-out prompts.

    Attributes:
        quality: by name: `draft_prob` as the drafter states it, `features`, `oracle`.
    """

    features: FeatureEstimate
    oracle: OracleEstimate
    quality: dict[str, Quality]


def fit_estimates(
    sample: SampledNodes, train: frozenset[str], *, num_folds: int, is_sampled: bool, seed: int
) -> Estimates:
    """Fits the features on training prompts, the oracle across all of them.

    Raises:
        TraceEmptyError: nodes of one label only.
        TraceError: sampled traces without the target's log-probabilities.
    """
    trained = np.isin(sample.prompt, sorted(train))
    nodes, accepted = sample.nodes, sample.nodes.on_path
    drafted = nodes.features(DRAFTER_FEATURES)
    features = FeatureEstimate(fit_logistic(drafted[trained], accepted[trained]))
    oracle = _fit_oracle(sample, num_folds, is_sampled=is_sampled, seed=seed)
    check_labels(accepted[~trained])
    fold = np.array([oracle.fold_of[name] for name in sample.prompt.tolist()])
    probs = {
        "draft_prob": np.exp(nodes.draft_logp),
        "features": features.fit.prob(drafted),
        "oracle": oracle.of_folds(nodes, fold),
    }
    found = {name: quality(prob[~trained], accepted[~trained]) for name, prob in probs.items()}
    return Estimates(features, oracle, found)


def _fit_oracle(
    sample: SampledNodes, num_folds: int, *, is_sampled: bool, seed: int
) -> OracleEstimate:
    """One model a fold, of everything outside it."""
    fold_of = folds_of(sample.prompt_ids, num_folds, seed)
    fold = np.array([fold_of[name] for name in sample.prompt.tolist()])
    nodes = sample.nodes
    names = tuple(n for n in ORACLE_FEATURES if not np.isnan(nodes.features((n,))).all())
    features = sample.nodes.features(names)
    fits = tuple(
        fit_boosted(features[fold != index], sample.nodes.on_path[fold != index], seed=seed)
        for index in range(max(fold_of.values()) + 1)
    )
    return OracleEstimate(fits, fold_of, names, is_sampled)


def folds_of(prompt_ids: tuple[str, ...], num_folds: int, seed: int) -> dict[str, int]:
    """Folds of equal size, shuffled by seed; fewer where there are fewer prompts."""
    shuffled = np.random.default_rng(seed).permutation(sorted(prompt_ids)).tolist()
    num = min(num_folds, len(shuffled))
    return {prompt_id: place % num for place, prompt_id in enumerate(shuffled)}


def _root_law(nodes: NodeTable) -> Singles:
    """`[M]` the target's probability of nodes at depth 1, elsewhere whatever is logged."""
    if np.isnan(nodes.target_logp[nodes.depth == 1]).any():
        raise TraceError(
            "dense traces of sampled texts",
            expected="the target's log-probability at every node of depth 1",
            found="none",
            fix="collect them again with this specctl",
        )
    return np.exp(nodes.target_logp)
