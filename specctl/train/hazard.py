"""Where strict texts would first be relaxed: what a dense log tells of a threshold beforehand.

Up to its first relaxed token a relaxed text is the strict one, so whether and where it leaves it
follows from the strict rounds, exactly. What it says afterwards does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specctl.policy.records import Record
from specctl.stats import Interval, ratio_of_sums, share


class Openings(Protocol):
    """The rounds of strict texts, in order; `replay.fit_inputs.Openings` is one.

    Attributes:
        num_tokens: `[Q]` tokens of each text.
        text: `[M]` the text of each round, ascending. place: `[M]` tokens emitted before the one
            that the round's end was about. closeness: `[M]`, -inf where nothing could be relaxed.
    """

    @property
    def num_tokens(self) -> NDArray[np.int64]: ...
    @property
    def text(self) -> NDArray[np.int64]: ...
    @property
    def place(self) -> NDArray[np.int64]: ...
    @property
    def closeness(self) -> NDArray[np.float32]: ...


class Hazard(Record):
    """What one threshold would do to the texts of a log.

    Attributes:
        num_texts: in the log.
        diverged: share of texts with a relaxed token.
        per_token: first relaxations over tokens at risk, that is, up to them.
        median_place: tokens before the first relaxation, over the texts that have one.
    """

    num_texts: int
    diverged: Interval
    per_token: Interval
    median_place: float | None


def hazards(found: Openings, bounds: Sequence[float]) -> tuple[Hazard, ...]:
    """One hazard a bound of closeness.

    Args:
        bounds: what closeness has to exceed; see `policy.mars.bound`.
    """
    return tuple(_hazard(found, least) for least in bounds)


def _hazard(found: Openings, least: float) -> Hazard:
    num_texts = len(found.num_tokens)
    opened = found.closeness > np.float32(least)
    texts, first = np.unique(found.text[opened], return_index=True)
    places = found.place[opened][first]
    events, at_risk = np.zeros(num_texts), found.num_tokens.astype(np.float64)
    events[texts], at_risk[texts] = 1, places + 1
    return Hazard(
        num_texts=num_texts,
        diverged=share(len(texts), num_texts),
        per_token=ratio_of_sums(events, at_risk),
        median_place=float(np.median(places)) if len(places) else None,
    )


def keep_below(values: Sequence[Any], found: Sequence[Hazard], max_diverged: float) -> int:
    """How many thresholds, from the strictest on, change at most that share of texts.

    Cutting the lax end of a fixed sequence keeps the contract's promise, however the cut was
    chosen: it can only take certificates away.
    """
    assert len(values) == len(found)
    shares = [hazard.diverged.value for hazard in found]
    return next((i for i, value in enumerate(shares) if value > max_diverged), len(shares))
