"""Choosing a setting: on training prompts, by a rule that is stated, measured on the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specctl.policy import Policy, build_shape
from systems.bench import Bench
from systems.curves import Curve, figure
from systems.families import STATIC, THRESHOLD, Family


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

    def one(self, name: str, policy: Policy) -> Curve:
        """A single policy on held-out prompts."""
        return self.bench.curve(name, {name: policy}, "held_out")


def fastest(curve: Curve) -> str:
    """The setting of the highest Σ tokens / Σ time."""
    rate = figure(curve.pooled, "tokens") / figure(curve.pooled, "time_us")
    return curve.labels[int(np.argmax(rate))]


def levels_of(policy: Policy) -> int:
    """The most that it drafts: the depth of its control."""
    return build_shape(policy.shape).max_depth
