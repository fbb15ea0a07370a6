"""Intervals of figures over prompts, in closed form: prompts are independent, tokens are not.

Ratios are of sums, never means of ratios; their variance is that of each prompt's influence
(the delta method). Differences between two policies are paired: both answered the same prompts.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.artifacts import Metric
from specctl.policy.records import Record

Floats = NDArray[np.float64]
CONFIDENCE = 0.95


class Estimate(Record):
    """A figure with its two-sided 95 % interval; null where the data do not define one."""

    value: float | None
    low: float | None
    high: float | None

    def text(self, digits: int = 3, scale: float = 1.0, unit: str = "") -> str:
        """`1.234 [1.2, 1.3]`, or a dash."""
        if self.value is None:
            return "-"
        value, low, high = (
            "-" if number is None else f"{scale * number:.{digits}f}"
            for number in (self.value, self.low, self.high)
        )
        return f"{value}{unit} [{low}, {high}]"

    def metric(self, num_prompts: int) -> Metric:
        """For the manifest.

        Args:
            num_prompts: that the interval was taken over.
        """
        return Metric.of(self.value, self.low, self.high, level=CONFIDENCE, num_prompts=num_prompts)


UNKNOWN = Estimate(value=None, low=None, high=None)


def ratio_of_sums(above: Floats, below: Floats) -> Estimate:
    """Σ above / Σ below over `[n]` prompts."""
    if below.sum() == 0:
        return UNKNOWN
    value = above.sum() / below.sum()
    influence = (above - value * below) / below.sum()
    half = _half_width(influence)
    return _estimate(value, value - half, value + half)


def ratio_of_ratios(ours: tuple[Floats, Floats], theirs: tuple[Floats, Floats]) -> Estimate:
    """(Σ a / Σ b) of ours over that of theirs, prompt by prompt the same; on the log scale."""
    sums = [float(part.sum()) for part in (*ours, *theirs)]
    if 0 in sums:
        return UNKNOWN
    a, b, c, d = (part / total for part, total in zip((*ours, *theirs), sums, strict=True))
    value = sums[0] / sums[1] / (sums[2] / sums[3])
    factor = np.exp(_half_width(a - b - c + d))
    return _estimate(value, value / factor, value * factor)


def paired_difference(differences: Floats) -> Estimate:
    """Mean of differences in [-1, 1]: Bonett and Price (J. Educ. Behav. Stat. 37, 2012).

    A prompt that gains and one that loses are added before the variance is taken, so that
    no difference among few prompts is not read as certainty.
    """
    size = len(differences) + 2
    mean = differences.sum() / size
    variance = ((differences**2).sum() + 2) / size - mean**2
    half = _quantile() * np.sqrt(variance / size)
    return _estimate(differences.mean(), mean - half, mean + half)


def recovery_ratio(ours: Floats, theirs: Floats) -> Estimate:
    """Σ ours / Σ theirs of answers that are right (1) or wrong (0), paired, on the log scale.

    As in `paired_difference`, one prompt that gains and one that loses are added first.
    """
    if theirs.sum() == 0:
        return UNKNOWN
    above, below = ours.sum() + 1, theirs.sum() + 1
    discordant = ((ours - theirs) ** 2).sum() + 2
    factor = np.exp(_quantile() * np.sqrt(discordant / (above * below)))
    value = ours.sum() / theirs.sum()
    return _estimate(value, above / below / factor, above / below * factor)


def share(count: int, size: int) -> Estimate:
    """A share of prompts, with Wilson's interval."""
    from scipy.stats import binomtest

    if size == 0:
        return UNKNOWN
    found: Any = binomtest(count, size).proportion_ci(CONFIDENCE, method="wilson")
    return _estimate(count / size, found.low, found.high)


def _half_width(influence: Floats) -> float:
    """Of a sum of independent influences with mean 0."""
    size = len(influence)
    spread = size / max(1, size - 1) * (influence**2).sum()
    return float(_quantile() * np.sqrt(spread))


def _quantile() -> float:
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def _estimate(value: float, low: float, high: float) -> Estimate:
    return Estimate(value=float(value), low=float(low), high=float(high))
