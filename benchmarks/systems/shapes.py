"""Shapes one request at a time, at equal depth and equal tau: what a policy saves beyond levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from systems.choosing import Found, levels_of
from systems.curves import Paired, tau
from systems.roster import Roster

DEPTH = 6
"""Levels of EAGLE-2's tree, and of everything that is compared with it."""
EQUAL_TAU_OF = (4, 8, 16, 32)
"""Sizes of the static tree, root counted, at whose tau shapes are compared."""
Row = dict[str, Any]


def equal_depth_rows(found: Found, who: Roster, paired: Paired) -> Iterator[Row]:
    """Every family against the static tree of its own depth, at that tree's tau.

    HeteroSpec chooses its levels itself, so its control is as deep as its deepest bin.
    """
    for name, family, fits in who.compared():
        depth = levels_of(next(iter(fits[0].settings(DEPTH).values())))
        static, threshold = found.static(depth), found.threshold(depth)
        ours = [found.curve(one, DEPTH, "held_out") for one in fits]
        for size in EQUAL_TAU_OF:
            at = static.only(static.labels.index(str(size)))
            yield {
                "family": family,
                "shape": name,
                "levels": depth,
                "num_tokens": size,
                "tau": float(tau(at.pooled)[0]),
                "tokens": paired.tokens_of(ours, at),
                "tokens_over_threshold": paired.curve_against(ours, threshold, at),
                "support": min(curve.support for curve in ours),
            }
