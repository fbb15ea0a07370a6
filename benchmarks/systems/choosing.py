"""Choosing a setting: on training prompts, by a rule that is stated, measured on the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from specctl.policy import Policy, build_shape
from systems.bench import Bench
from systems.curves import Curve, figure
from systems.families import EAGLE2, STATIC, THRESHOLD, Family

CALLS_SLACK = 0.0
"""Calls above EAGLE-2's that a setting may need on training prompts, a share; the target allows
2 % on held-out ones."""


@dataclass
class Found:
    """Curves, measured once; those of the controls at any depth that somebody asks for."""

    bench: Bench
    known: dict[tuple[str, int, str], Curve] = field(default_factory=dict)

    def curve(self, family: Family, depth: int, side: str) -> Curve:
        """A family at a depth on one side."""
        key = (family.name, depth, side)
        if key not in self.known:
            name = f"{family.name}, {depth} levels"
            self.known[key] = self.bench.curve(name, family.settings(depth), side)
        return self.known[key]

    def static(self, depth: int, side: str = "held_out") -> Curve:
        """The control of the same depth."""
        return self.curve(STATIC, depth, side)

    def threshold(self, depth: int, side: str = "held_out") -> Curve:
        """The plain joint-probability threshold."""
        return self.curve(THRESHOLD, depth, side)

    def eagle2(self, side: str = "held_out") -> Curve:
        """EAGLE-2 with 6 levels and 60 nodes."""
        return self.bench.curve("eagle2", {"6 levels, N 60": EAGLE2}, side)


def thriftiest(curves: Iterator[Curve], reference: Curve) -> tuple[str, Policy]:
    """The setting of fewest verified tokens among those that need hardly more calls.

    Where none keeps within the slack it is the one of fewest calls: a family that cannot serve
    the same text in as many rounds shows it in the table.

    Args:
        curves: of one family, on training prompts. reference: one setting, whose calls bind.
    """
    most = (1 + CALLS_SLACK) * float(figure(reference.pooled, "calls")[0])
    settings = [
        (float(figure(sums, "calls")), float(figure(sums, "verified")), label, policy)
        for curve in curves
        for sums, label, policy in zip(curve.pooled, curve.labels, curve.policies, strict=True)
    ]
    within = [setting for setting in settings if setting[0] <= most]
    best = min(within, key=lambda s: s[1]) if within else min(settings, key=lambda s: s[0])
    return best[2], best[3]


def fastest(curve: Curve) -> tuple[str, Policy]:
    """The setting of the highest Σ tokens / Σ time on training prompts."""
    rate = figure(curve.pooled, "tokens") / figure(curve.pooled, "time_us")
    index = int(np.argmax(rate))
    return curve.labels[index], curve.policies[index]


def levels_of(policy: Policy) -> int:
    """The most that it drafts: the depth of its control."""
    return build_shape(policy.shape).max_depth
