"""What a served batch is offered: requests, their order and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Floats, Longs

TURNS = 8
"""Requests per slot at least, unless a number is given: enough for a steady state in between."""
Seed = int | Sequence[int]


@dataclass(frozen=True)
class Load:
    """A closed loop, or open arrivals.

    With neither a rate nor times the loop is closed: a finished request is replaced at once. With
    one of them requests wait, first come first served, for one of `batch_size` slots.

    Attributes:
        batch_size: slots, requests decoded together at most.
        arrival_rate_per_s: of a Poisson process.
        arrivals_us: the times themselves, never falling.
        num_requests: submitted in all; by default the whole log once, or `TURNS` per slot where
            that is more, or as many as there are arrival times. The log is gone through again,
            in another order, where it is too short.

    Raises:
        UsageError: numbers out of range, or that contradict each other.
    """

    batch_size: int
    arrival_rate_per_s: float | None = None
    arrivals_us: tuple[float, ...] | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        _check("batch_size", self.batch_size >= 1, "at least 1", self.batch_size)
        rate, times, number = self.arrival_rate_per_s, self.arrivals_us, self.num_requests
        if number is not None:
            _check("num_requests", number >= 1, "at least 1", number)
        if rate is not None:
            _check("arrival_rate_per_s", 0 < rate < np.inf, "above 0, or none for a loop", rate)
            _check("arrivals", times is None, "a rate or times", "both")
        if times is not None:
            _check_times(times)
            same = number in (None, len(times))
            _check("num_requests", same, f"that of the arrival times, {len(times)}", number)

    @property
    def is_closed(self) -> bool:
        """Whether requests arrive as others finish."""
        return self.arrival_rate_per_s is None and self.arrivals_us is None

    def draw(self, num_logged: int, seed: Seed) -> Queue:
        """The requests of one run, of a log that has `num_logged`."""
        shuffling, arriving = np.random.default_rng(seed).spawn(2)
        number = len(self.arrivals_us) if self.arrivals_us else self.num_requests
        number = number or max(num_logged, TURNS * self.batch_size)
        passes = [shuffling.permutation(num_logged) for _ in range(-(-number // num_logged))]
        return Queue(np.concatenate(passes)[:number], self._arrivals(number, arriving))

    def _arrivals(self, number: int, generator: np.random.Generator) -> Floats | None:
        if self.arrivals_us is not None:
            return np.array(self.arrivals_us, np.float64)
        if self.arrival_rate_per_s is None:
            return None
        gaps_us: Floats = generator.exponential(1e6 / self.arrival_rate_per_s, number)
        return np.cumsum(gaps_us)


@dataclass(frozen=True)
class Queue:
    """M requests in the order in which they are served.

    Attributes:
        logged: `[M]` int64, which request of the log each is.
        arrival_us: `[M]` float64; None in a closed loop.
    """

    logged: Longs
    arrival_us: Floats | None


def _check_times(times: tuple[float, ...]) -> None:
    _check("arrivals_us", len(times) > 0, "at least one time", "none")
    gaps = np.diff(np.array(times, np.float64), prepend=0.0)
    wrong = np.flatnonzero(~((gaps >= 0) & (gaps < np.inf)))
    if len(wrong):
        law = "times from 0 on that never fall"
        _check(f"arrivals_us[{wrong[0]}]", False, law, times[wrong[0]])


def _check(what: str, holds: bool, expected: str, found: object) -> None:  # noqa: FBT001
    if not holds:
        raise UsageError(what, expected=expected, found=str(found), fix="correct it")
