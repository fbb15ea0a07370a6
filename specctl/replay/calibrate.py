"""Fitting how likely the target accepts a node, given that it accepted the parent.

Conditionals are fitted and multiplied along the path, so that no node outranks its parent whatever
was fitted (notes/state-of-the-art.md, sections 2.1 and 4c). Labels are the nodes that the text
speaks about: the children of nodes on its path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specctl.errors import TraceEmptyError
from specctl.logs.positions import Bools, Floats
from specctl.policy.budgets import Calibration
from specctl.stats import calibration_errors

Singles = NDArray[np.float32]
LOWEST = 1e-6
"""Probabilities are kept this far from 0 and 1: a step of an isotonic fit may hold no label of
one kind, which is no proof that there is none."""
NUM_BINS = 15
"""Equal-mass bins of the calibration error."""


class Fit(Protocol):
    """A fitted conditional acceptance."""

    def prob(self, features: Singles) -> Singles:
        """`[M]` float32 in (0, 1), from `[M, F]`."""
        ...


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
        found = np.interp(self.log_odds(features), *self.knots)
        return _inside(found)


@dataclass(frozen=True)
class BoostedFit:
    """Gradient-boosted trees: interactions that a logistic regression cannot see."""

    model: Any

    def prob(self, features: Singles) -> Singles:
        return _inside(self.model.predict_proba(features)[:, 1])


@dataclass(frozen=True)
class Quality:
    """How good probabilities are on nodes that did not make them.

    Attributes:
        log_loss: nats a node. calibration_error: mean |predicted - seen| over `NUM_BINS`
            equal-mass bins (ECE); chance alone keeps it above 0. base_rate: share accepted.
    """

    num_nodes: int
    log_loss: float
    calibration_error: float
    base_rate: float

    def to_json(self) -> dict[str, Any]:
        return vars(self).copy()


def fit_logistic(features: Singles, accepted: Bools) -> LogisticFit:
    """Fits `LogisticFit`.

    Args:
        features: `[M, F]`, finite. accepted: `[M]`.

    Raises:
        TraceEmptyError: all nodes have one label.
    """
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    check_labels(accepted)
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
    """Fits `BoostedFit`; NaN features are allowed and stand for "not logged".

    Raises:
        TraceEmptyError: all nodes have one label.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    check_labels(accepted)
    model = HistGradientBoostingClassifier(
        max_iter=60, max_leaf_nodes=15, min_samples_leaf=50, early_stopping=False, random_state=seed
    )
    return BoostedFit(model.fit(features, accepted))


def fit_calibration(log_odds: Singles, depth: NDArray[np.integer], accepted: Bools) -> Calibration:
    """The record that budgets read: a logistic function of the draft probability per depth.

    A depth with labels of one kind only takes the fit of the depth above it.

    Raises:
        TraceEmptyError: the first depth has none, or labels of one kind.
    """
    from sklearn.linear_model import LogisticRegression

    slopes, intercepts = [], []
    for level in range(1, int(depth.max(initial=1)) + 1):
        here = depth == level
        if level == 1:
            check_labels(accepted[here])
        if len(np.unique(accepted[here])) == 2:
            model = LogisticRegression(max_iter=1000).fit(log_odds[here, None], accepted[here])
            slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
        slopes.append(slope)
        intercepts.append(intercept)
    return Calibration(slopes=tuple(slopes), intercepts=tuple(intercepts))


def quality(prob: Singles, accepted: Bools) -> Quality:
    """Scores probabilities `[M]` against labels `[M]`, M at least 1."""
    p = np.clip(prob.astype(np.float64), LOWEST, 1 - LOWEST)
    loss = -np.where(accepted, np.log(p), np.log1p(-p)).mean()
    order = np.argsort(p, kind="stable")
    bins = [part for part in np.array_split(order, NUM_BINS) if len(part)]
    sums = np.array([(len(part), accepted[part].sum(), p[part].sum()) for part in bins])
    _, error = calibration_errors(*sums.T)
    return Quality(len(p), float(loss), error, float(accepted.mean()))


def check_labels(accepted: Bools) -> None:
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
