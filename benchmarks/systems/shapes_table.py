"""Shapes one request at a time: at equal depth and tau, and against EAGLE-2 as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specctl.policy import Policy
from systems.choosing import Found, levels_of, thriftiest
from systems.curves import Curve, Paired, tau, tokens_per_call
from systems.families import STATIC, Family
from systems.roster import Roster

EQUAL_TAU_OF = (4, 8, 16, 32)
"""Sizes of the static tree, root counted, at whose tau shapes are compared."""
Row = dict[str, Any]


def equal_depth_rows(found: Found, families: Sequence[Family], paired: Paired) -> Iterator[Row]:
    """Every shape against the static tree of its own depth, at that tree's tau."""
    for family in families:
        for depth in family.depths:
            static, threshold = found.static(depth), found.threshold(depth)
            ours = found.curve(family, depth, "held_out")
            for size in EQUAL_TAU_OF:
                at = static.only(static.labels.index(str(size)))
                yield {
                    "levels": depth,
                    "shape": family.name,
                    "num_tokens": size,
                    "tau": float(tau(at.pooled)[0]),
                    "tokens": paired.tokens_of(ours, at),
                    "tokens_over_threshold": paired.curve_against(ours, threshold, at),
                    "support": ours.support,
                }


def system_rows(found: Found, who: Roster, paired: Paired) -> Iterator[Row]:
    """One row a system, its setting chosen on training prompts; then fits as they come."""
    reference = found.eagle2("train")
    for family in who.curves:
        curves = _curves(found, family, who)
        label, policy = thriftiest(curves, reference)
        yield system_row(found, family.name, label, policy, paired)
    for name, policy in who.fitted.items():
        yield system_row(found, name, "as fitted", policy, paired)


def _curves(found: Found, family: Family, who: Roster) -> Iterator[Curve]:
    """All settings of a family on training prompts."""
    if family.name in who.grids:
        yield found.bench.curve(family.name, who.grids[family.name], "train")
        return
    for depth in family.depths:
        yield found.curve(family, depth, "train")


def system_row(found: Found, name: str, setting: str, policy: Policy, paired: Paired) -> Row:
    """One policy beside EAGLE-2 and the two controls of its own depth."""
    ours = found.bench.curve(name, {setting: policy}, "held_out")
    eagle2, depth = found.eagle2(), levels_of(policy)
    static, threshold = found.static(depth), found.threshold(depth)
    return {
        "system": name,
        "setting": setting,
        "levels": depth,
        "tau": paired.interval(ours, lambda sums: tau(sums[..., 0, :])),
        "tokens_per_call": paired.interval(ours, lambda sums: tokens_per_call(sums[..., 0, :])),
        "calls_over_eagle2": paired.change(ours, eagle2, "calls"),
        "verified_over_eagle2": paired.change(ours, eagle2, "verified"),
        "tokens_at_equal_tau_eagle2": paired.tokens_against(ours, found.static(6)),
        "tokens_at_equal_tau_static": paired.tokens_against(ours, static),
        "tokens_at_equal_tau_threshold": paired.tokens_against(ours, threshold),
        "tau_at_equal_tokens_static": paired.tau_against(ours, static),
        "support": ours.support,
    }


def learned(who: Roster) -> list[Family]:
    """Shapes that are compared with their controls."""
    return [family for family in who.curves if family is not STATIC]
