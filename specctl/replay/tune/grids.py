"""The stated grids: which values of which settings tuning looks at, family by family.

The families state them (`specctl.policy.family.Family`). `specctl tune --show-grid` prints them,
`--grid field=v1,v2` replaces one, a setting in the name of a family (`svip:window=8`) fixes it.
"""

from __future__ import annotations

from typing import cast

from specctl.policy import families
from specctl.policy.family import PROBS, WINDOWS, Grid, Scaled

__all__ = ["PROBS", "WINDOWS", "Grid", "Scaled"]

_GRIDS = {word: grid for family in families.SHAPES for word, grid in family.grids.items()}
SHAPES = {word: cast(Grid, grid) for word, grid in _GRIDS.items() if ":" not in word and grid}
SIGNALS = {
    word.removeprefix("stop:signal="): cast(Grid, grid)
    for word, grid in _GRIDS.items()
    if word.startswith("stop:signal=")
}
"""Of `stop`, whose threshold has the unit of its signal."""
SHARED_SHAPES = {known.kind: known.shared_grid for known in families.SHAPES if known.shared_grid}
"""Coarser, for shapes that a budget trims anyway."""
BUDGETS = {word: dict(grid) for family in families.BUDGETS for word, grid in family.grids.items()}
BY_COSTS = "by step costs"
"""Of `max_tokens`: none is given, so the step costs decide alone."""
FITTED = {known.kind: known.fitted_grid for known in families.SHAPES if known.fitted_grid}
"""Of fitted artifacts, by shape; what a fit learned stays as fitted."""
SHARED_FITTED = {
    known.kind: known.shared_fitted_grid for known in families.SHAPES if known.shared_fitted_grid
}
"""The same under a budget, which trims nodes but no levels; other settings stay as fitted."""
MAX_SETTINGS = 4096
"""Of one family; more is a slip of the keyboard."""
