"""Curves: one knob of a policy turned, and what two curves say of each other at equal footing.

A policy that verifies less and accepts less is neither better nor worse than another; what it costs
*at the same tau* is. So a family is measured along its knob (size, threshold), and read off
between two settings, linear in log(verified tokens per call) over tau. Resamples of the prompts
go through the same reading, which pairs everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Floats
from specctl.policy import Policy
from specctl.replay.ladder.tally import SUMS
from specctl.stats import Interval, Resamples

COLUMNS = {name: index for index, name in enumerate(SUMS)}
Reading = Callable[[Floats], Floats]
"""From sums `[..., K, S]` of a curve's K settings to a figure `[...]`."""


@dataclass(frozen=True)
class Curve:
    """K settings of one family on the same P prompts.

    Attributes:
        labels: of the settings, as `--policy` takes them or the value of the knob.
        sums: `[K, P, S]`, columns `ladder.tally.SUMS`.
        support: least share, over the settings, of what was asked that the log holds.
    """

    name: str
    labels: tuple[str, ...]
    policies: tuple[Policy, ...]
    sums: Floats
    support: float = 1.0

    @property
    def pooled(self) -> Floats:
        """`[K, S]`"""
        return self.sums.sum(1)

    def only(self, index: int) -> Curve:
        """One of its settings."""
        place = slice(index, index + 1)
        return Curve(
            self.name, self.labels[place], self.policies[place], self.sums[place], self.support
        )


def figure(sums: Floats, name: str) -> Floats:
    """A column of `[..., S]`."""
    return sums[..., COLUMNS[name]]


def tau(sums: Floats) -> Floats:
    """Mean acceptance length, bonus included."""
    return 1 + figure(sums, "accepted") / figure(sums, "calls")


def tokens_per_call(sums: Floats) -> Floats:
    """Verified tokens a call, root included."""
    return figure(sums, "verified") / figure(sums, "calls")


def tokens_at(sums: Floats, wanted: Floats) -> Floats:
    """Verified tokens a call `[...]` at a tau `[...]`, of `[..., K, S]`; NaN beyond the curve."""
    return np.exp(_by_row(_least_reaching, tau(sums), np.log(tokens_per_call(sums)), wanted))


def tau_at(sums: Floats, wanted: Floats) -> Floats:
    """Tau `[...]` at so many verified tokens a call; NaN beyond the curve."""
    return _by_row(_most_within, np.log(tokens_per_call(sums)), tau(sums), np.log(wanted))


def _by_row(
    read: Callable[[Floats, Floats, float], float], x: Floats, y: Floats, wanted: Floats
) -> Floats:
    """`read` on each row of `[..., K]`."""
    rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), np.ravel(wanted)
    found = [read(*row) for row in zip(*rows, strict=True)]
    return np.array(found).reshape(x.shape[:-1])


def _least_reaching(tau: Floats, log_tokens: Floats, wanted: float) -> float:
    """Fewest tokens for a tau or more: a setting that a better one undercuts does not count."""
    order = np.lexsort((log_tokens, tau))
    least = np.minimum.accumulate(log_tokens[order][::-1])[::-1]
    return _between(tau[order], least, wanted)


def _most_within(log_tokens: Floats, tau: Floats, wanted: float) -> float:
    """Highest tau for so many tokens or fewer."""
    order = np.lexsort((-tau, log_tokens))
    most = np.maximum.accumulate(tau[order])
    return _between(log_tokens[order], most, wanted)


def _between(x: Floats, y: Floats, wanted: float) -> float:
    """Linear between neighbours; of settings at one place the better, which stands first."""
    places, first = np.unique(x, return_index=True)
    return float(np.interp(wanted, places, y[first], left=np.nan, right=np.nan))


Fits = Curve | Sequence[Curve]
"""One curve, or the same curve of every fit; whatever was fitted to nothing has one."""


@dataclass(frozen=True)
class Estimate(Interval):
    """A figure over prompts and fits.

    Attributes:
        by_fit: the figure of each fit over all prompts, in the order of the seeds.
    """

    by_fit: tuple[float, ...] = ()


@dataclass(frozen=True)
class Paired:
    """Compares curves over the same resamples of the same prompts, and of the fits.

    The figure of several fits is their mean. A resample draws prompts, then fits, both with
    replacement: the interval is of what another fit to other data would give on other prompts, on
    the average of as many fits.
    """

    resamples: Resamples
    seed: int = 0

    @classmethod
    def of(cls, num_prompts: int, seed: int) -> Paired:
        return cls(Resamples.draw(num_prompts, seed=seed), seed)

    def interval(self, curve: Fits, reading: Reading) -> Estimate:
        """A figure of one curve."""
        return self._interval((curve,), lambda one: reading(one))

    def tau(self, ours: Fits) -> Estimate:
        """Mean acceptance length of single settings."""
        return self.interval(ours, lambda sums: tau(sums[..., 0, :]))

    def tokens(self, ours: Fits) -> Estimate:
        """Verified tokens a call of single settings."""
        return self.interval(ours, lambda sums: tokens_per_call(sums[..., 0, :]))

    def ratio(self, ours: Fits, above: str, below: str) -> Estimate:
        """Of two sums of single settings."""
        return self.interval(
            ours, lambda sums: figure(sums[..., 0, :], above) / figure(sums[..., 0, :], below)
        )

    def change(self, ours: Fits, theirs: Fits, name: str, per: str = "") -> Estimate:
        """Of a sum, or of its ratio to another; ours over theirs less 1; single settings."""

        def read(sums: Floats) -> Floats:
            one = sums[..., 0, :]
            return figure(one, name) / (figure(one, per) if per else 1)

        return self._interval((ours, theirs), lambda a, b: read(a) / read(b) - 1)

    def tau_change(self, ours: Fits, theirs: Fits) -> Estimate:
        """Of the mean acceptance length, ours over theirs less 1; single settings."""
        return self._interval(
            (ours, theirs), lambda a, b: tau(a[..., 0, :]) / tau(b[..., 0, :]) - 1
        )

    def tokens_of(self, ours: Fits, theirs: Fits) -> Estimate:
        """Tokens a call of our curve over those of their one setting, at its tau; less 1."""

        def ratio(a: Floats, b: Floats) -> Floats:
            one = b[..., 0, :]
            return tokens_at(a, tau(one)) / tokens_per_call(one) - 1

        return self._interval((ours, theirs), ratio)

    def tokens_against(self, ours: Fits, theirs: Fits) -> Estimate:
        """Tokens a call of our one setting over those of their curve, at our tau; less 1."""

        def ratio(a: Floats, b: Floats) -> Floats:
            one = a[..., 0, :]
            return tokens_per_call(one) / tokens_at(b, tau(one)) - 1

        return self._interval((ours, theirs), ratio)

    def tau_against(self, ours: Fits, theirs: Fits) -> Estimate:
        """Tau of our one setting over that of their curve at our tokens a call; less 1."""

        def ratio(a: Floats, b: Floats) -> Floats:
            one = a[..., 0, :]
            return tau(one) / tau_at(b, tokens_per_call(one)) - 1

        return self._interval((ours, theirs), ratio)

    def curve_against(self, ours: Fits, theirs: Fits, at: Fits) -> Estimate:
        """Tokens a call of our curve over those of theirs at the tau of a third's setting."""

        def ratio(a: Floats, b: Floats, c: Floats) -> Floats:
            wanted = tau(c[..., 0, :])
            return tokens_at(a, wanted) / tokens_at(b, wanted) - 1

        return self._interval((ours, theirs, at), ratio)

    def _interval(self, sides: Sequence[Fits], reading: Callable[..., Floats]) -> Estimate:
        of_fits = [(side,) if isinstance(side, Curve) else tuple(side) for side in sides]
        number = max(map(len, of_fits))
        drawn = np.stack(
            [
                self._drawn([one[fit % len(one)] for one in of_fits], reading)
                for fit in range(number)
            ]
        )
        by_fit = tuple(drawn[:, 0].tolist())
        if not np.isfinite(by_fit).all():
            return Estimate(math.nan, math.nan, math.nan, by_fit)
        random = np.random.default_rng((self.seed, 1))
        times = random.multinomial(number, np.full(number, 1 / number), drawn.shape[1] - 1)
        weights = np.concatenate([np.ones((1, number)), times]) / number
        found = self.resamples.read((weights.T * drawn).sum(0))
        return Estimate(found.value, found.low, found.high, by_fit)

    def _drawn(self, curves: Sequence[Curve], reading: Callable[..., Floats]) -> Floats:
        """`[1 + B]`. Curves stand side by side, prompt by prompt: one resample serves all."""
        tables = [np.moveaxis(curve.sums, 0, 1) for curve in curves]
        num_prompts = len(tables[0])
        flat = np.concatenate([table.reshape(num_prompts, -1) for table in tables], 1)
        ends = np.cumsum([0, *(table[0].size for table in tables)])
        sums = self.resamples.drawn(flat)
        parts = [
            sums[..., a:b].reshape(*sums.shape[:-1], *table.shape[1:])
            for a, b, table in zip(ends[:-1], ends[1:], tables, strict=True)
        ]
        return np.asarray(reading(*parts))
