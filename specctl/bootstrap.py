"""Bootstrap by prompt: tokens of one text are dependent, prompts are not.

Resamples are multinomial weights over prompts, drawn once and used for every figure of every
policy, so that differences between policies are paired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_RESAMPLES = 2000
Figure = Callable[[Floats], Floats]
"""From sums `[..., S]` to figures `[...]`: a ratio of sums, never a mean of ratios."""


@dataclass(frozen=True)
class Interval:
    """A figure with its percentile interval. NaN where it is not defined."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return vars(self).copy()


@dataclass(frozen=True)
class Resamples:
    """Weights `[B, P]` of P prompts in B resamples.

    Attributes:
        confidence: of two-sided percentile intervals.
    """

    weights: Floats
    confidence: float = 0.95

    @classmethod
    def draw(
        cls, num_prompts: int, *, seed: int = 0, num: int = NUM_RESAMPLES, confidence: float = 0.95
    ) -> Resamples:
        """Resamples of `num_prompts` prompts with replacement."""
        generator = np.random.default_rng(seed)
        shares = np.full(num_prompts, 1 / num_prompts)
        return cls(generator.multinomial(num_prompts, shares, num).astype(np.float64), confidence)

    def interval(self, sums: Floats, figure: Figure) -> Interval:
        """A figure of sums per prompt, `[P, S]`."""
        return self._interval(figure(sums.sum(0)), figure(self.weights @ sums))

    def ratio(self, ours: Floats, theirs: Floats, figure: Figure) -> Interval:
        """Ours over theirs, paired: both sides see the same prompts in every resample."""
        value = figure(ours.sum(0)) / figure(theirs.sum(0))
        drawn = figure(self.weights @ ours) / figure(self.weights @ theirs)
        return self._interval(value, drawn)

    def bounds(self, drawn: Floats) -> tuple[float, float]:
        """Ends of the interval of a figure drawn `[B]`; NaN where no resample defines it."""
        inside = drawn[np.isfinite(drawn)]
        if not len(inside):
            return float("nan"), float("nan")
        tail = 50 * (1 - self.confidence)
        low, high = np.percentile(inside, [tail, 100 - tail])
        return float(low), float(high)

    def _interval(self, value: Floats, drawn: Floats) -> Interval:
        return Interval(float(value), *self.bounds(drawn))


def sums_by(codes: NDArray[np.integer], num_groups: int, values: Floats) -> Floats:
    """`[G, S]` sums of `values` `[M, S]` per group."""
    total = np.zeros((num_groups, values.shape[1]))
    for column in range(values.shape[1]):
        total[:, column] = np.bincount(codes, values[:, column], num_groups)
    return total
