"""An alarm that may be read after every unit, with a bounded probability of ringing falsely.

A unit is a prompt, or all prompts of an hour, a day or a conversation. While nothing changes, the
units of a stream and those of the reference are exchangeable. So the rank of a unit's figure among
all units before it is uniform, whatever the figure's distribution, and the ranks are independent
(conformal p-values; Vovk, Gammerman and Shafer, *Algorithmic Learning in a Random World*, 2005,
chapter 8). The alarm bets on the ranks: its wealth starts at 1, is fair while they are uniform, and
grows when they are not. By Ville's inequality fair wealth reaches 1/alpha with probability at most
alpha, ever. So the promise is of the whole watch, of any length, over all signals together, and
needs no assumption on their dependence.

It assumes that the order of units carries no information while nothing changes. The order of
prompts does where traffic swings with the hour or comes in conversations: then the day or the
conversation is the unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Floats = NDArray[np.float64]
SHIFTS = (0.15, 0.3, 0.6, 1.2)
"""Changes that the wealth bets on, up and down: of the normal score of a rank, so in standard
deviations between units."""
MOST, LEAST_ALPHA = 1e100, 1e-90
"""Most that a bet pays, so that numbers stay finite, which keeps the wealth fair; and the smallest
alpha that such wealth can reach."""
PRIOR = 50.0
"""Units until which the stakes on starts fall slowly."""


def p_values(reference: Floats, stream: Floats, random: np.random.Generator) -> Floats:
    """`[n]` share of the units so far with a larger figure, ties broken at random.

    Uniform on (0, 1) and independent while `reference` and `stream` are exchangeable. NaN for units
    without a figure.

    Args:
        reference: `[R]` figures of the units before the watch.
        stream: `[n]` figures in order.
    """
    known = np.isfinite(stream)
    values = np.concatenate([reference[np.isfinite(reference)], stream[known]])
    first = len(values) - int(known.sum())
    larger, equal = _earlier(values)
    ranks = larger + random.random(len(values)) * (equal + 1)
    found = np.full(len(stream), np.nan)
    found[known] = (ranks / np.arange(1, len(values) + 1))[first:]
    return found


def _earlier(values: Floats) -> tuple[Floats, Floats]:
    """`[n]` counts of earlier values that are larger, and of equal ones, by merging."""
    codes = np.unique(values, return_inverse=True)[1]
    number = len(codes)
    larger, equal = np.zeros(number), np.zeros(number)
    size = 1
    while size < number:
        # In each pair of neighbouring blocks: ranks of the right one's values within the left one.
        block = np.arange(number) // size
        right, pair = block % 2 == 1, block // 2
        key = pair * (codes.max() + 1) + codes
        left = np.sort(key[~right])
        ends = np.searchsorted(pair[~right], pair[right], side="right")
        after = np.searchsorted(left, key[right], side="right")
        larger[right] += ends - after
        equal[right] += after - np.searchsorted(left, key[right], side="left")
        size *= 2
    return larger, equal


def wealth(p: Floats) -> Floats:
    """The wealth after every unit, `[n, ...]`, of fair bets on p-values of many streams at once.

    A bet of shift d multiplies its stake by exp(d z - d^2 / 2), the likelihood ratio of the normal
    score z = Phi^-1(1 - p) shifted by d; NaN leaves it unchanged. The prior of starts falls as
    1 / (k log^2 k), so that a change after k quiet units costs about log k.

    Args:
        p: `[n, ...]`, NaN for units without a figure.
    """
    z = -ndtri(np.clip(p, 1e-12, 1 - 1e-12))
    shifts = np.array([*SHIFTS, *(-shift for shift in SHIFTS)])
    stakes = start_prior(len(p))
    active = np.zeros((*p.shape[1:], len(shifts)))
    found, waiting = np.empty(p.shape), 1.0
    for k, stake in enumerate(stakes):
        waiting -= stake
        factor = np.exp(shifts * z[k][..., None] - shifts**2 / 2)
        grown = (active + stake) * np.where(np.isfinite(factor), factor, 1.0)
        active = np.minimum(grown, MOST)
        found[k] = active.mean(-1) + waiting
    return found


def start_prior(number: int) -> Floats:
    """Prior probabilities of the first `number` starts; they sum to less than 1."""
    ends = 1 / np.log2(1 + (PRIOR + np.arange(number + 1)) / PRIOR)
    return np.asarray(ends[:-1] - ends[1:])


@dataclass(frozen=True)
class Change:
    """The likeliest move of a signal."""

    start: int  # index in the stream of the first unit after the change
    shift: float  # one of `SHIFTS` or its negative, in standard deviations between units


def likeliest_change(p: Floats) -> Change:
    """The start and shift under which the p-values `[n]` of a stream are likeliest."""
    z = np.nan_to_num(-ndtri(np.clip(p, 1e-12, 1 - 1e-12)))
    known = np.isfinite(p)
    best = (-math.inf, Change(0, 0.0))
    for shift in (*SHIFTS, *(-shift for shift in SHIFTS)):
        gains = np.where(known, shift * z - shift**2 / 2, 0.0)
        from_here = np.cumsum(gains[::-1])[::-1]
        start = int(np.argmax(from_here))
        best = max(best, (float(from_here[start]), Change(start, shift)), key=lambda one: one[0])
    return best[1]
