"""Estimates of acceptance: one from the drafter's knowledge, one from an oracle's.

Conditionals are fitted and multiplied along the path, so that no node outranks its parent whatever
was fitted (notes/state-of-the-art.md, sections 2.1 and 4c). Labels are the nodes that the text
speaks about: the children of nodes on its path.

**Features** (R_feat). A logistic and isotonic fit on training prompts, over the drafter's own view.

**Oracle** (R_prob). A node's acceptance probability given the target's distribution. Dense logs
hold that distribution only below nodes of the accepted path, and which nodes those are is the
outcome itself: a decision that used it where it is logged would look into the future. Hence, at
every node alike:

- sampled texts: at depth 1 the target's own probability, which is logged at every position and
  exact; deeper, a cross-fitted estimate.
- greedy texts: the target's probability is 0 or 1, and knowing it is the clairvoyant. The estimate
  takes its place at every depth.

Cross-fitted: each prompt is estimated by a model that saw none of its nodes, and that knows how
sure the target is at the root. So the rung is an estimate of R_prob from below, wherever the model
is worse than the truth, and it is named as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.errors import TraceEmptyError, TraceError
from specctl.logs.node_table import NodeTable, SampledNodes
from specctl.logs.positions import Bools, Floats, Positions, Singles
from specctl.results import ProbabilityQuality
from specctl.stats import calibration_errors

DRAFTER_FEATURES = ("log_odds", "entropy", "depth", "log_rank")
"""A drafter's view of a node: log-odds of its probability (nats), full entropy of the
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
LOWEST = 1e-6
"""Probabilities are kept this far from 0 and 1: a step of an isotonic fit may hold no label of
one kind, which is no proof that there is none."""
NUM_BINS = 15
"""Equal-mass bins of the calibration error."""


@dataclass(frozen=True)
class LogisticFit:
    """Logistic regression on standardised features, then isotonic regression on its log-odds.

    Attributes:
        center, scale, weights: `[F]`. intercept: log-odds, nats.
        knots: `[2, T]` float64, log-odds and the acceptance there; linear between.
    """

    center: Floats
    scale: Floats
    weights: Floats
    intercept: float
    knots: Floats

    def log_odds(self, features: Singles) -> Floats:
        """`[M]` nats, before the isotonic step."""
        return ((features - self.center) / self.scale) @ self.weights + self.intercept

    def prob(self, features: Singles) -> Singles:
        """`[M]` float32 in (0, 1), from `[M, F]`."""
        return _inside(np.interp(self.log_odds(features), *self.knots))


@dataclass(frozen=True)
class BoostedFit:
    """Gradient-boosted trees: interactions that a logistic regression cannot see."""

    model: Any

    def prob(self, features: Singles) -> Singles:
        return _inside(self.model.predict_proba(features)[:, 1])


def fit_logistic(features: Singles, accepted: Bools) -> LogisticFit:
    """Fits `LogisticFit`.

    Args:
        features: `[M, F]`, finite. accepted: `[M]`.
    """
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    _check_labels(accepted)
    center, scale = features.mean(0, np.float64), features.std(0, np.float64)
    scale = np.where(scale > 0, scale, 1.0)
    model = LogisticRegression(max_iter=1000).fit((features - center) / scale, accepted)
    weights, intercept = model.coef_[0], float(model.intercept_[0])
    raw = LogisticFit(center, scale, weights, intercept, np.zeros((2, 1)))
    monotone = IsotonicRegression(out_of_bounds="clip")
    monotone.fit(raw.log_odds(features), accepted)
    knots = np.stack([monotone.X_thresholds_, monotone.y_thresholds_])
    return LogisticFit(center, scale, weights, intercept, knots)


def fit_boosted(features: Singles, accepted: Bools, *, seed: int) -> BoostedFit:
    """Fits `BoostedFit`; NaN features are allowed and stand for "not logged"."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    _check_labels(accepted)
    model = HistGradientBoostingClassifier(
        max_iter=60, max_leaf_nodes=15, min_samples_leaf=50, early_stopping=False, random_state=seed
    )
    return BoostedFit(model.fit(features, accepted))


def quality(prob: Singles, accepted: Bools) -> ProbabilityQuality:
    """Scores probabilities `[M]` against labels `[M]`, M at least 1."""
    p = np.clip(prob.astype(np.float64), LOWEST, 1 - LOWEST)
    loss = -np.where(accepted, np.log(p), np.log1p(-p)).mean()
    parts = np.array_split(np.argsort(p, kind="stable"), NUM_BINS)
    sums = [(len(part), accepted[part].sum(), p[part].sum()) for part in parts if len(part)]
    _, error = calibration_errors(*np.array(sums, np.float64).T)
    return ProbabilityQuality(
        num_nodes=len(p),
        log_loss=float(loss),
        calibration_error=error,
        base_rate=float(accepted.mean()),
    )


def _check_labels(accepted: Bools) -> None:
    """Refuses labels of one kind: any probability would explain them."""
    if len(np.unique(accepted)) < 2:
        raise TraceEmptyError(
            "calibration",
            expected="accepted and rejected draft tokens",
            found=f"{len(accepted)} of one kind",
            fix="collect traces of more prompts, or with another drafter",
        )


def _inside(prob: Floats) -> Singles:
    return np.clip(prob, LOWEST, 1 - LOWEST).astype(np.float32)


@dataclass(frozen=True)
class FeatureEstimate:
    """From `DRAFTER_FEATURES`."""

    fit: LogisticFit

    def conditional(self, nodes: NodeTable, positions: Positions) -> Singles:
        """`[M]` float32 for nodes of a chunk, roots not among them."""
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

    fits: tuple[BoostedFit, ...]
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
        if not self.is_sampled:
            return prob
        first = nodes.depth == 1
        if np.isnan(nodes.target_logp[first]).any():
            raise TraceError(
                "dense traces of sampled texts",
                expected="the target's log-probability at every node of depth 1",
                found="none",
                fix="collect them again with this specctl",
            )
        return np.where(first, np.exp(nodes.target_logp), prob)


AcceptanceEstimate = FeatureEstimate | OracleEstimate


@dataclass(frozen=True)
class Estimates:
    """Both, and how good they are on the nodes of held-out prompts.

    Attributes:
        quality: by name: `draft_prob` as the drafter states it, `features`, `oracle`.
    """

    features: FeatureEstimate
    oracle: OracleEstimate
    quality: dict[str, ProbabilityQuality]


def fit_estimates(
    sample: SampledNodes, train: frozenset[str], *, num_folds: int, is_sampled: bool, seed: int
) -> Estimates:
    """Fits the features on training prompts, the oracle across all of them."""
    trained = np.isin(sample.prompt, sorted(train))
    nodes, accepted = sample.nodes, sample.nodes.on_path
    drafted = nodes.features(DRAFTER_FEATURES)
    features = FeatureEstimate(fit_logistic(drafted[trained], accepted[trained]))
    fold_of = folds_of(sample.prompt_ids, num_folds, seed)
    fold = np.array([fold_of[name] for name in sample.prompt.tolist()])
    names = tuple(n for n in ORACLE_FEATURES if not np.isnan(nodes.features((n,))).all())
    whole = nodes.features(names)
    fits = tuple(
        fit_boosted(whole[fold != index], accepted[fold != index], seed=seed)
        for index in range(max(fold_of.values()) + 1)
    )
    oracle = OracleEstimate(fits, fold_of, names, is_sampled)
    _check_labels(accepted[~trained])
    probs = {
        "draft_prob": np.exp(nodes.draft_logp),
        "features": features.fit.prob(drafted),
        "oracle": oracle.of_folds(nodes, fold),
    }
    found = {name: quality(prob[~trained], accepted[~trained]) for name, prob in probs.items()}
    return Estimates(features, oracle, found)


def folds_of(prompt_ids: tuple[str, ...], num_folds: int, seed: int) -> dict[str, int]:
    """Folds of equal size, shuffled by seed; fewer where there are fewer prompts."""
    shuffled = np.random.default_rng(seed).permutation(sorted(prompt_ids)).tolist()
    num = min(num_folds, len(shuffled))
    return {prompt_id: place % num for place, prompt_id in enumerate(shuffled)}


def joint_acceptance(
    estimate: AcceptanceEstimate, nodes: NodeTable, positions: Positions, wanted: Bools
) -> Singles:
    """`[M]` float32, conditionals multiplied from the root down; 1 at roots.

    In float32 the product with a number of at most 1 never grows, so no child outranks its
    parent. Unwanted nodes are 0, and so are all below an unlikely node (`LEAST_PROB`).

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
