"""Rungs and their distances: rates with intervals, gap closed, and where the rest is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specctl.logs.positions import Floats, Ints
from specctl.replay.ladder.tally import SUMS, Tally
from specctl.results import MARKED_BELOW
from specctl.stats import Interval, Resamples, sums_by

Kind = Literal["plain", "chain", "tree", "policy", "features", "oracle", "clairvoyant", "ceiling"]
ESTIMATES = ("features", "oracle")
"""Rungs that rest on a fitted model."""
Figure = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Entry:
    """A rung before it is measured.

    Attributes:
        label: unique. setting: what was tuned, in words. tally: of the held-out requests.
        support: share of what it asked that the log contains.
    """

    kind: Kind
    label: str
    setting: str
    tally: Tally
    support: float = 1.0


@dataclass(frozen=True)
class Rung:
    """A measured rung; intervals are 95% by prompt, all rungs on the same resamples.

    Attributes:
        time_us: machine time of all requests, see `LoadClock`.
        tokens_per_s, mean_acceptance_length: pooled, sums over sums.
        against_static: tokens/s over those of the best static rung.
        gap_closed: (R - R_static) / (R_prob - R_static); None where the oracle's lead over the
            static rung is not above 0 at both ends of its interval.
        policy_regret: R_feat - R, tokens/s; of policies and static rungs, else None.
        support, is_marked: as in `replay.score`.
    """

    kind: Kind
    label: str
    setting: str
    num_tokens: int
    calls: int
    verified_tokens: int
    num_accepted: int
    drafted_levels: int
    time_us: float
    tokens_per_s: Interval
    mean_acceptance_length: Interval
    against_static: Interval
    gap_closed: Interval | None
    policy_regret: Interval | None
    support: float
    is_marked: bool

    @property
    def is_estimate(self) -> bool:
        """Whether it rests on a fitted model, and is no bound in itself."""
        return self.kind in ESTIMATES

    def to_json(self) -> dict[str, Any]:
        values = {
            name: value.to_json() if isinstance(value, Interval) else value
            for name, value in vars(self).items()
        }
        return {**values, "is_estimate": self.is_estimate}


@dataclass(frozen=True)
class Split:
    """Where the time between the best static rung and the clairvoyant goes, tokens/s.

    Attributes:
        irreducible: R_clair - R_prob, what only the outcome itself tells.
        drafter: R_prob - R_feat, what the target knows and the drafter's features do not.
        headroom: R_prob / R_static - 1, a share: what any policy can hope for.
    """

    irreducible: Interval
    drafter: Interval
    headroom: Interval

    def to_json(self) -> dict[str, Any]:
        return {name: value.to_json() for name, value in vars(self).items()}


@dataclass(frozen=True)
class Measure:
    """Figures over the tallies of several rungs, side by side.

    Attributes:
        table: `[P, E * S]`, per prompt, a rung's sums after another's.
    """

    table: Floats
    labels: tuple[str, ...]
    resamples: Resamples

    @classmethod
    def of(cls, entries: Sequence[Entry], prompt: Ints, seed: int) -> Measure:
        """`prompt`: `[Q]` codes of the held-out requests."""
        _, codes = np.unique(prompt, return_inverse=True)
        num = int(codes.max()) + 1
        table = np.concatenate([sums_by(codes, num, e.tally.sums) for e in entries], 1)
        labels = tuple(entry.label for entry in entries)
        return cls(table, labels, Resamples.draw(num, seed=seed))

    def interval(self, figure: Figure) -> Interval:
        """A figure of sums `[..., E * S]`."""
        return self.resamples.interval(self.table, figure)

    def column(self, label: str, name: str) -> Figure:
        """One sum of one rung."""
        index = self.labels.index(label) * len(SUMS) + SUMS.index(name)
        return lambda sums: sums[..., index]

    def rate(self, label: str) -> Figure:
        """tokens/s of one rung."""
        tokens, time_us = self.column(label, "tokens"), self.column(label, "time_us")
        return lambda sums: 1e6 * tokens(sums) / time_us(sums)

    def less(self, label: str, other: str) -> Figure:
        """tokens/s of one rung less another's."""
        ours, theirs = self.rate(label), self.rate(other)
        return lambda sums: ours(sums) - theirs(sums)

    def over(self, label: str, other: str) -> Figure:
        """tokens/s of one rung over another's."""
        ours, theirs = self.rate(label), self.rate(other)
        return lambda sums: ours(sums) / theirs(sums)


def measure_rung(entry: Entry, measure: Measure, names: dict[Kind, str], static: str) -> Rung:
    """One rung; `names` holds the label of each bound, `static` that of the best static rung."""
    label, total = entry.label, entry.tally.total
    accepted, calls = measure.column(label, "accepted"), measure.column(label, "calls")
    below = entry.kind in ("plain", "chain", "tree", "policy")
    return Rung(
        kind=entry.kind,
        label=label,
        setting=entry.setting,
        num_tokens=int(total("tokens")),
        calls=int(total("calls")),
        verified_tokens=int(total("verified")),
        num_accepted=int(total("accepted")),
        drafted_levels=int(total("levels")),
        time_us=total("time_us"),
        tokens_per_s=measure.interval(measure.rate(label)),
        mean_acceptance_length=measure.interval(lambda s: 1 + accepted(s) / calls(s)),
        against_static=measure.interval(measure.over(label, static)),
        gap_closed=gap_closed(measure, label, static, names["oracle"]),
        policy_regret=measure.interval(measure.less(names["features"], label)) if below else None,
        support=entry.support,
        is_marked=entry.support < MARKED_BELOW,
    )


def gap_closed(measure: Measure, label: str, static: str, oracle: str) -> Interval | None:
    """The share of the way from the best static rung to the oracle; None where there is none."""
    gap = measure.less(oracle, static)
    if measure.interval(gap).low <= 0:
        return None
    ours = measure.less(label, static)
    return measure.interval(lambda sums: ours(sums) / gap(sums))


def split_of(measure: Measure, names: dict[Kind, str], static: str) -> Split:
    """The distances between the bounds."""
    over = measure.over(names["oracle"], static)
    return Split(
        irreducible=measure.interval(measure.less(names["clairvoyant"], names["oracle"])),
        drafter=measure.interval(measure.less(names["oracle"], names["features"])),
        headroom=measure.interval(lambda sums: over(sums) - 1),
    )
