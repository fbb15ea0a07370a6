"""Curves: one knob of a policy turned, and what two curves say of each other at equal footing.

A policy that verifies less and accepts less is neither better nor worse than another; what it costs
*at the same tau* is. So a family is measured along its knob (size, threshold), and read off
between two settings, linear in log(verified tokens per call) over tau. Resamples of the prompts
go through the same reading, which pairs everything.
"""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True)
class Paired:
    """Compares curves over the same resamples of the same prompts."""

    resamples: Resamples

    @classmethod
    def of(cls, num_prompts: int, seed: int) -> Paired:
        return cls(Resamples.draw(num_prompts, seed=seed))

    def interval(self, curve: Curve, reading: Reading) -> Interval:
        """A figure of one curve."""
        return self._interval((curve,), lambda one: reading(one))

    def change(self, ours: Curve, theirs: Curve, name: str) -> Interval:
        """Of a sum, ours over theirs less 1; single settings."""

        def ratio(a: Floats, b: Floats) -> Floats:
            return figure(a[..., 0, :], name) / figure(b[..., 0, :], name) - 1

        return self._interval((ours, theirs), ratio)

    def change_per(self, ours: Curve, theirs: Curve, name: str, per: str) -> Interval:
        """Of a ratio of sums, ours over theirs less 1; single settings."""

        def ratio(a: Floats, b: Floats) -> Floats:
            mine, other = a[..., 0, :], b[..., 0, :]
            found = figure(mine, name) / figure(mine, per)
            return found / (figure(other, name) / figure(other, per)) - 1

        return self._interval((ours, theirs), ratio)

    def tokens_of(self, ours: Curve, theirs: Curve) -> Interval:
        """Tokens a call of our curve over those of their one setting, at its tau; less 1."""

        def ratio(a: Floats, b: Floats) -> Floats:
            one = b[..., 0, :]
            return tokens_at(a, tau(one)) / tokens_per_call(one) - 1

        return self._interval((ours, theirs), ratio)

    def tokens_against(self, ours: Curve, theirs: Curve) -> Interval:
        """Tokens a call of our one setting over those of their curve, at our tau; less 1."""

        def ratio(a: Floats, b: Floats) -> Floats:
            one = a[..., 0, :]
            return tokens_per_call(one) / tokens_at(b, tau(one)) - 1

        return self._interval((ours, theirs), ratio)

    def tau_against(self, ours: Curve, theirs: Curve) -> Interval:
        """Tau of our one setting over that of their curve at our tokens a call; less 1."""

        def ratio(a: Floats, b: Floats) -> Floats:
            one = a[..., 0, :]
            return tau(one) / tau_at(b, tokens_per_call(one)) - 1

        return self._interval((ours, theirs), ratio)

    def curve_against(self, ours: Curve, theirs: Curve, at: Curve) -> Interval:
        """Tokens a call of our curve over those of theirs at the tau of a third's setting."""

        def ratio(a: Floats, b: Floats, c: Floats) -> Floats:
            wanted = tau(c[..., 0, :])
            return tokens_at(a, wanted) / tokens_at(b, wanted) - 1

        return self._interval((ours, theirs, at), ratio)

    def _interval(self, curves: tuple[Curve, ...], reading: Callable[..., Floats]) -> Interval:
        """Curves stand side by side, prompt by prompt, so that one resample serves all."""
        tables = [np.moveaxis(curve.sums, 0, 1) for curve in curves]
        num_prompts = len(tables[0])
        flat = np.concatenate([table.reshape(num_prompts, -1) for table in tables], 1)
        ends = np.cumsum([0, *(table[0].size for table in tables)])

        def read(sums: Floats) -> Floats:
            parts = [
                sums[..., a:b].reshape(*sums.shape[:-1], *table.shape[1:])
                for a, b, table in zip(ends[:-1], ends[1:], tables, strict=True)
            ]
            return reading(*parts)

        return self.resamples.interval(flat, read)
