"""Estimates of acceptance: one from the drafter's knowledge, one from an oracle's.

Conditionals are fitted and multiplied along the path, so that no node outranks its parent whatever
was fitted. Labels are the nodes that the text
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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specctl.errors import TraceEmptyError, TraceError
from specctl.logs.node_table import LabelledNodes, NodeTable
from specctl.logs.positions import Bools, Floats, Longs, Singles
from specctl.replay.facts import ResultRecord
from specctl.stats import boosted_trees, calibration_errors

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
"""The drafter's view, the path's log-probability, and how sure the target is at the root: entropy
and top-2 margin (nats) of the distribution that verifies depth 1, which no policy can know."""
LEAST_PROB = 1e-3
"""Below a node that is less likely accepted than this, none is considered: it would be drafted
and verified once in a thousand rounds' hope."""
LOWEST = 1e-6
"""Probabilities are kept this far from 0 and 1: a step of an isotonic fit may hold no label of
one kind, which is no proof that there is none."""
NUM_BINS = 15
"""Equal-mass bins of the calibration error."""


class ProbabilityQuality(ResultRecord):
    """Quality of acceptance probabilities on nodes that they were not fitted on."""

    num_nodes: int
    log_loss: float  # nats a node
    calibration_error: float  # ECE over equal-mass bins; chance alone keeps it above 0
    base_rate: float  # share accepted


Fit = Callable[[Singles], Singles]
"""From features `[M, F]`, float32, to probabilities `[M]`, float32 in (0, 1)."""
Conditional = Callable[[NodeTable, Longs], Singles]
"""From M nodes, roots not among them, and the fold of each one's prompt, to probabilities `[M]` of
acceptance given the parent's, float32."""


def fit_logistic(features: Singles, accepted: Bools) -> Fit:
    """Logistic regression on standardised features, then isotonic regression on its log-odds.

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

    def log_odds(features: Singles) -> Floats:
        found: Floats = ((features - center) / scale) @ weights + intercept
        return found

    monotone = IsotonicRegression(out_of_bounds="clip").fit(log_odds(features), accepted)
    knots = monotone.X_thresholds_, monotone.y_thresholds_
    return lambda features: _inside(np.interp(log_odds(features), *knots))


def fit_boosted(features: Singles, accepted: Bools, *, seed: int) -> Fit:
    """Boosted trees: interactions that a logistic regression cannot see. NaN features stand for
    "not logged"."""
    _check_labels(accepted)
    predict = boosted_trees(features, accepted, seed=seed)
    return lambda features: _inside(predict(features))


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
            f"calibration: expected accepted and rejected draft tokens, found {len(accepted)} of "
            "one kind",
            hint="collect traces of more prompts, or with another drafter",
        )


def _inside(prob: Floats) -> Singles:
    return np.clip(prob, LOWEST, 1 - LOWEST).astype(np.float32)


@dataclass(frozen=True)
class Estimates:
    """Estimates by name, `features` and `oracle`, and how good they are on held-out prompts."""

    conditionals: Mapping[str, Conditional]
    fold_of: Mapping[str, int]  # of the sample's prompts; the oracle of a fold never saw its own
    oracle_features: tuple[str, ...]  # names of `ORACLE_FEATURES` that the log holds
    quality: dict[str, ProbabilityQuality]  # by name, and `draft_prob` as the drafter states it


def fit_estimates(
    sample: LabelledNodes, train: frozenset[str], *, num_folds: int, is_sampled: bool, seed: int
) -> Estimates:
    """Fits the features on the sample's training prompts, the oracle across all of its prompts."""
    trained = np.isin(sample.prompt, sorted(train))
    nodes, accepted = sample.nodes, sample.nodes.on_path
    fold_of = folds_of(sample.prompt_ids, num_folds, seed)
    fold = np.array([fold_of[name] for name in sample.prompt.tolist()])
    names = tuple(n for n in ORACLE_FEATURES if not np.isnan(nodes.features((n,))).all())
    drafted, whole = nodes.features(DRAFTER_FEATURES), nodes.features(names)
    by_features = fit_logistic(drafted[trained], accepted[trained])
    by_fold = [
        fit_boosted(whole[fold != index], accepted[fold != index], seed=seed)
        for index in range(max(fold_of.values()) + 1)
    ]
    _check_labels(accepted[~trained])

    def features(nodes: NodeTable, fold: Longs) -> Singles:
        del fold
        return by_features(nodes.features(DRAFTER_FEATURES))

    def oracle(nodes: NodeTable, fold: Longs) -> Singles:
        known, prob = nodes.features(names), np.ones(len(fold), np.float32)
        for index in np.unique(fold).tolist():
            prob[fold == index] = by_fold[index](known[fold == index])
        if not is_sampled:
            return prob
        first = nodes.depth == 1
        if np.isnan(nodes.target_logp[first]).any():
            raise TraceError(
                "dense traces of sampled texts: expected the target's log-probability at every "
                "node of depth 1, found none",
                hint="collect them again with this specctl",
            )
        return np.where(first, np.exp(nodes.target_logp), prob)

    conditionals: dict[str, Conditional] = {"features": features, "oracle": oracle}
    probs = {
        "draft_prob": np.exp(nodes.draft_logp),
        **{name: conditional(nodes, fold) for name, conditional in conditionals.items()},
    }
    found = {name: quality(prob[~trained], accepted[~trained]) for name, prob in probs.items()}
    return Estimates(conditionals, fold_of, names, found)


def folds_of(prompt_ids: tuple[str, ...], num_folds: int, seed: int) -> dict[str, int]:
    """Folds of equal size, shuffled by seed; fewer where there are fewer prompts."""
    shuffled = np.random.default_rng(seed).permutation(sorted(prompt_ids)).tolist()
    num = min(num_folds, len(shuffled))
    return {prompt_id: place % num for place, prompt_id in enumerate(shuffled)}


def joint_acceptance(
    conditional: Conditional, nodes: NodeTable, fold: Longs, wanted: Bools
) -> Singles:
    """`[M]` float32, conditionals multiplied from the root down; 1 at roots.

    In float32 the product with a number of at most 1 never grows, so no child outranks its
    parent. Unwanted nodes are 0, and so are all below an unlikely node (`LEAST_PROB`).

    Args:
        nodes: of a chunk, whole. fold: `[M]`. wanted: `[M]`, closed under parents.
    """
    joint: Singles = (nodes.depth == 0).astype(np.float32)
    order = np.argsort(nodes.depth, kind="stable")
    ends = np.cumsum(np.bincount(nodes.depth))
    for start, end in pairwise(ends):
        level = order[start:end]
        level = level[wanted[level] & (joint[nodes.parent[level]] >= LEAST_PROB)]
        joint[level] = joint[nodes.parent[level]] * conditional(nodes.take(level), fold[level])
    return joint
