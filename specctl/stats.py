"""Statistics that all verbs share: splits by prompt, intervals, areas, calibration, boosting.

Tokens of one text depend on each other, prompts do not. So data is split by prompt, intervals
resample prompts or sum their influences, and figures are ratios of sums, not means of ratios.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PlainSerializer

from specctl.errors import TraceEmptyError

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
"""Confidence of all intervals."""
QUANTILE = 1.96
"""Half the width of such an interval, in standard errors."""
MIN_PROMPTS = 8
"""Fewest prompts of an interval: over fewer, resampling and variance are far too narrow."""
NUM_RESAMPLES = 2000
MOST_ENUMERATED, NUM_SWAPS = 14, 20_000
"""Most prompts of which every swap is tried; number of random swaps for more prompts."""
Figure = Callable[[Floats], Floats]
"""From sums `[..., S]` to figures `[...]`."""

# --------------------------------------------------------------------------- splits


@dataclass(frozen=True)
class Split:
    """Prompt ids on each side, sorted; both are non-empty and share none."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def split_prompts(prompt_ids: Iterable[str], *, held_out_frac: float, seed: int) -> Split:
    """Splits by a hash of (seed, prompt id), so that every verb splits a trace set alike, on any
    machine.

    A prompt is held out if its hash, read as a number in [0, 1), is below `held_out_frac`. Each
    side gets at least `MIN_PROMPTS` prompts, or one if there are fewer than twice as many: the
    prompts nearest to the cut change sides. With one seed a smaller held-out side lies within a
    larger one.

    Raises:
        TraceEmptyError: fewer than two prompts.
    """

    def position(prompt_id: str) -> float:
        digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    ordered = sorted(set(prompt_ids), key=position)
    if len(ordered) < 2:
        raise TraceEmptyError(
            f"a split by prompt needs at least 2 prompts with rounds; there are {len(ordered)}",
            hint=f"collect traces of more prompts; intervals need {MIN_PROMPTS} held out",
        )
    wanted = sum(position(prompt_id) < held_out_frac for prompt_id in ordered)
    least = MIN_PROMPTS if len(ordered) >= 2 * MIN_PROMPTS else 1
    cut = min(max(wanted, least), len(ordered) - least)
    return Split(train=tuple(sorted(ordered[cut:])), held_out=tuple(sorted(ordered[:cut])))


# --------------------------------------------------------------------------- intervals

Number = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(
        lambda value: value if math.isfinite(value) else None,
        return_type=float | None,
        when_used="json",
    ),
]
"""A float; NaN if undefined, null in JSON."""


@dataclass(frozen=True)
class Interval:
    """A figure with the ends of its two-sided 95 % interval; NaN if undefined."""

    value: Number
    low: Number
    high: Number

    @classmethod
    def of_json(cls, ends: Mapping[str, float | None]) -> Self:
        """The interval of its JSON, in which an undefined end is null."""
        return cls(**{name: math.nan if end is None else end for name, end in ends.items()})

    @property
    def known(self) -> bool:
        """Whether the data define the figure."""
        return math.isfinite(self.value)

    def to_json(self) -> dict[str, float]:
        return vars(self).copy()

    def text(self, spec: str = ".3f") -> str:
        """`1.234 [1.2, 1.3]` with numbers in a format; `-` or `n/a` if undefined."""
        if not self.known:
            return "-"
        ends = [f"{x:{spec}}" for x in (self.low, self.high) if math.isfinite(x)]
        return f"{self.value:{spec}} [{', '.join(ends) if ends[1:] else 'n/a'}]"

    @property
    def is_bounded(self) -> bool:
        """Whether there were prompts enough for the interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)


UNKNOWN = Interval(math.nan, math.nan, math.nan)


def intervals_over(num_prompts: int, by: str = "prompt") -> str:
    """The caption of intervals over this many prompts."""
    if num_prompts >= MIN_PROMPTS:
        return f"95% intervals by {by}, each by itself"
    return f"intervals n/a: they need {MIN_PROMPTS} prompts, here are {num_prompts}"


@dataclass(frozen=True)
class Resamples:
    """B bootstrap resamples of P prompts, shared by all figures, so that differences are paired."""

    weights: Floats  # `[B, P]`
    confidence: float = CONFIDENCE
    is_enough: bool = True  # False: too few prompts for intervals

    @classmethod
    def draw(
        cls,
        num_prompts: int,
        *,
        seed: int = 0,
        num: int = NUM_RESAMPLES,
        confidence: float = CONFIDENCE,
        least: int | None = None,
    ) -> Resamples:
        """Draws prompts with replacement; below `least` prompts, by default `MIN_PROMPTS`,
        intervals are undefined."""
        shares = np.full(num_prompts, 1 / num_prompts)
        weights = np.random.default_rng(seed).multinomial(num_prompts, shares, num)
        return cls(weights.astype(np.float64), confidence, num_prompts >= (least or MIN_PROMPTS))

    def interval(self, sums: Floats, figure: Figure) -> Interval:
        """A figure of sums per prompt, `[P, S]`."""
        return self.read(figure(self.drawn(sums)))

    def mean(self, values: NDArray[Any], prompt: NDArray[np.integer]) -> Interval:
        """The mean of rows `[M]`, given the code of each row's prompt; NaN without rows."""
        columns = np.stack([values, np.ones(len(values))], 1).astype(np.float64)
        sums = sums_by(prompt, self.weights.shape[1], columns)
        return self.of_prompts(int(np.count_nonzero(sums[:, 1]))).interval(sums, first_over_second)

    def of_prompts(self, num_prompts: int) -> Resamples:
        """The resamples for a figure of some of the prompts; too few have no interval."""
        return replace(self, is_enough=self.is_enough and num_prompts >= MIN_PROMPTS)

    def ratio(self, ours: Floats, theirs: Floats, figure: Figure) -> Interval:
        """Ours over theirs, paired: each resample has the same prompts on both sides."""
        return self.read(figure(self.drawn(ours)) / figure(self.drawn(theirs)))

    def drawn(self, sums: Any) -> Floats:
        """`[1 + B, S]`: sums of `[P, S]` over all prompts, then over each resample."""
        return np.concatenate([sums.sum(0)[None], self.weights @ sums])

    def read(self, figure: Floats) -> Interval:
        """The interval of a figure of `drawn` sums, `[1 + B]`."""
        return Interval(float(figure[0]), *self.bounds(figure[1:]))

    def bounds(self, drawn: Floats) -> tuple[float, float]:
        """Ends of the percentile interval of a figure drawn `[B]`; NaN if no draw is finite."""
        inside = drawn[np.isfinite(drawn)]
        if not len(inside) or not self.is_enough:
            return math.nan, math.nan
        tail = 50 * (1 - self.confidence)
        low, high = np.percentile(inside, [tail, 100 - tail])
        return float(low), float(high)


def resample(num_prompts: int, num_runs: int, seed: int) -> Resamples:
    """Resamples of prompts and, independently, of runs: `[B, U * P]` products of their weights.

    The pigeonhole bootstrap (Owen, Ann. Appl. Stat. 1(2), 2007), as both prompts and runs vary.
    With one run it is the bootstrap by prompt.
    """
    prompts = Resamples.draw(num_prompts, seed=seed)
    if num_runs == 1:
        return prompts
    runs = Resamples.draw(num_runs, seed=seed + 1).weights
    both = runs[:, :, None] * prompts.weights[:, None, :]
    return Resamples(both.reshape(len(both), -1), is_enough=prompts.is_enough)


def with_time_error(
    drawn: Floats, columns: Sequence[int], error: float | None, policy: str, seed: int
) -> Floats:
    """Adds the error of the clock to drawn sums `[1 + B, S]` of a policy.

    The times of each resample are multiplied by exp(error · z), with one normal z per resample. So
    the interval of any figure combines the error over prompts and that of the clock, on the log
    scale. Two policies draw independently: under one clock their errors are partly shared and would
    cancel in a ratio, so independence is conservative. A policy always draws alike, so that its
    ratio to itself is 1.

    Args:
        columns: of times.
        error: relative standard error of a policy's time; None changes nothing.
        policy: name of the policy, which seeds its draws.
    """
    if not error:
        return drawn
    random = np.random.default_rng((zlib.crc32(policy.encode()), seed))
    timed = drawn.copy()
    timed[1:, columns] *= np.exp(error * random.standard_normal(len(drawn) - 1))[:, None]
    return timed


def sums_by(
    codes: NDArray[np.integer], num_groups: int, values: Floats | Sequence[NDArray[Any]]
) -> Floats:
    """`[G, S]` sums of `values` per group: `[M, S]`, or S columns `[M]`."""
    columns = values.T if isinstance(values, np.ndarray) else values
    return np.stack([np.bincount(codes, column, num_groups) for column in columns], 1).astype(float)


def first_over_second(sums: Floats) -> Floats:
    """A `Figure`: the first of sums `[..., 2]` over the second, NaN for 0 over 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


def ratio_of_sums(above: Floats, below: Floats) -> Interval:
    """Σ above / Σ below over `[n]` prompts, by the delta method."""
    if below.sum() == 0:
        return UNKNOWN
    value = above.sum() / below.sum()
    half = _half_width((above - value * below) / below.sum())
    return _interval(value, value - half, value + half, len(below))


def ratio_of_ratios(ours: tuple[Floats, Floats], theirs: tuple[Floats, Floats]) -> Interval:
    """(Σ a / Σ b) of ours over that of theirs, over the same prompts, on the log scale."""
    sums = [float(part.sum()) for part in (*ours, *theirs)]
    if 0 in sums:
        return UNKNOWN
    a, b, c, d = (part / total for part, total in zip((*ours, *theirs), sums, strict=True))
    value = sums[0] / sums[1] / (sums[2] / sums[3])
    factor = np.exp(_half_width(a - b - c + d))
    return _interval(value, value / factor, value * factor, len(a))


def swap_p_value(ours: Floats, theirs: Floats, figure: Figure, seed: int = 0) -> float:
    """Two-sided p-value of the ratio of two figures against 1.

    The randomisation test swaps both sides prompt by prompt: if they do not differ, each swap is
    equally likely. It tries every swap of up to 14 prompts, else 20,000 at random.

    Args:
        ours, theirs: `[P, S]` sums of each prompt. figure: of sums, `[..., S]` to `[...]`.
    """
    num_prompts = len(ours)
    if num_prompts <= MOST_ENUMERATED:
        swapped = (np.arange(1 << num_prompts)[:, None] >> np.arange(num_prompts)) & 1
    else:
        swapped = np.random.default_rng(seed).integers(2, size=(NUM_SWAPS, num_prompts))
        swapped[0] = 0  # the observed order is one of them
    kept = 1 - swapped
    one, other = kept @ ours + swapped @ theirs, swapped @ ours + kept @ theirs
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.abs(np.log(figure(one)) - np.log(figure(other)))
    return float(np.mean(distance >= distance[0] * (1 - 1e-9)))


def paired_difference(differences: Floats) -> Interval:
    """Mean of differences in [-1, 1]: Bonett and Price (J. Educ. Behav. Stat. 37, 2012).

    A prompt that gains and one that loses are added before the variance is taken. So the interval
    has a width even if no prompt differs.
    """
    size = len(differences) + 2
    mean = differences.sum() / size
    variance = ((differences**2).sum() + 2) / size - mean**2
    half = _quantile() * np.sqrt(variance / size)
    return _interval(differences.mean(), mean - half, mean + half, len(differences))


def recovery_ratio(ours: Floats, theirs: Floats) -> Interval:
    """Σ ours / Σ theirs of answers that are right (1) or wrong (0), paired, on the log scale.

    As in `paired_difference`, one prompt that gains and one that loses are added first.
    """
    if theirs.sum() == 0:
        return UNKNOWN
    above, below = ours.sum() + 1, theirs.sum() + 1
    discordant = ((ours - theirs) ** 2).sum() + 2
    factor = np.exp(_quantile() * np.sqrt(discordant / (above * below)))
    ends = above / below / factor, above / below * factor
    return _interval(ours.sum() / theirs.sum(), *ends, len(ours))


def share(count: int, size: int) -> Interval:
    """A share of prompts, with Wilson's interval."""
    if size == 0:
        return UNKNOWN
    value, spread = count / size, _quantile() ** 2 / size
    middle = (value + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (value * (1 - value) + spread / 4)) / (1 + spread)
    return _interval(value, max(middle - half, 0.0), min(middle + half, 1.0), size)


def _half_width(influence: Floats) -> float:
    """Half width of the interval of a sum of independent influences with mean 0."""
    size = len(influence)
    return float(_quantile() * np.sqrt(size / max(1, size - 1) * (influence**2).sum()))


def _quantile() -> float:
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def _interval(value: float, low: float, high: float, num_prompts: int) -> Interval:
    if num_prompts < MIN_PROMPTS:
        return Interval(float(value), math.nan, math.nan)
    return Interval(float(value), float(low), float(high))


# --------------------------------------------------------------------------- scores and labels


def auc(positive: NDArray[Any], negative: NDArray[Any]) -> Floats:
    """Area under the ROC curve: how often a positive outscores a negative, ties counting half.

    Args:
        positive, negative: `[..., C]` weights of each class by ascending score.

    Returns:
        `[...]`, NaN where a class is empty (Hanley and McNeil, 1982).
    """
    below = negative.cumsum(-1) - negative / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((positive * below).sum(-1) / positive.sum(-1) / negative.sum(-1))


def calibration_errors(count: Floats, positive: Floats, prob: Floats) -> tuple[float, float]:
    """Expected calibration error over bins: root mean square, corrected for chance, and mean.

    Chance alone makes the gap of a bin positive. Subtracting the variance of a share makes the
    squared gap unbiased (Kumar et al. 2019, arXiv:1909.10155, section 4); for the mean absolute gap
    no such correction is known.

    Args:
        count, positive, prob: `[B]` nodes of each bin, accepted ones, and the sum of probabilities.
    """
    rate, weights = positive / count, count / count.sum()
    gap = prob / count - rate
    chance = rate * (1 - rate) / np.maximum(count - 1, 1)
    squared = float((weights * (gap**2 - chance)).sum())
    return math.sqrt(max(0.0, squared)), float((weights * np.abs(gap)).sum())


# --------------------------------------------------------------------------- boosted trees

NUM_TREES, NUM_LEAVES, LEAF_ROWS = 60, 15, 50
"""Trees, leaves of each, fewest rows of a leaf."""


def boosted_trees(
    features: NDArray[np.float32],
    labels: NDArray[np.bool_],
    *,
    weight: Floats | None = None,
    seed: int,
) -> Callable[[NDArray[np.float32]], Floats]:
    """Fits gradient-boosted trees: a function from features `[M, F]` to probabilities `[M]`.

    NaN features are allowed and mean "unknown".

    Args:
        features: `[N, F]`. labels, weight: `[N]`.
    """
    import lightgbm as lgb

    parameters = {
        "objective": "binary",
        "num_leaves": NUM_LEAVES,
        "min_data_in_leaf": LEAF_ROWS,
        "seed": seed,
        "num_threads": 1,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }
    rows = lgb.Dataset(features, labels.astype(np.float32), weight=weight)
    model = lgb.train(parameters, rows, num_boost_round=NUM_TREES)
    return lambda given: np.asarray(model.predict(given, num_threads=1), np.float64)
