"""From the name of a family to the settings that its grid holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import UsageError
from specctl.policy.records import PerRequest
from specctl.replay.batch.submissions import shares
from specctl.replay.outcomes import check_replayable
from specctl.replay.tune.fitted import Settings, fitted_grid
from specctl.replay.tune.grids import (
    BUDGETS,
    SHAPES,
    SHARED_SHAPES,
    SIGNALS,
    Grid,
    Scaled,
)
from specctl.runtime.policy_spec import NamedPolicy, resolve_policy
from specctl.runtime.policy_words import pieces

STATIC = ("ar", "chain", "eagle2")
"""Families that nothing is learned for and that never look at a draft to decide."""
DEEP = ("eagle2", "ddd")
"""Shapes whose records demand more nodes than levels."""


@dataclass(frozen=True)
class Family:
    """A policy whose settings are searched.

    Attributes:
        name: as it was given, e.g. `svip:window=8`, `eagle2+survival` or an artifact's folder.
        shape, budget: words before and behind the `+`; no budget is empty.
        shape_grid, budget_grid: what is searched of each. `Scaled` until the load is known.
        artifact: `shape` is the folder that it was loaded from.
    """

    name: str
    shape: str
    budget: str
    shape_grid: Grid
    budget_grid: Mapping[str, tuple[str, ...] | Scaled] = field(default_factory=dict)
    artifact: NamedPolicy | None = None

    @property
    def is_static(self) -> bool:
        """Whether its settings are scored by sweep, as what others have to beat."""
        word = self.shape.partition(":")[0]
        return self.artifact is None and not self.budget and word in STATIC

    @property
    def fixed(self) -> Settings:
        """Settings of the shape that are not searched."""
        return {} if self.artifact else _settings(self.shape)

    @property
    def is_deep(self) -> bool:
        """Whether its trees must hold more nodes than levels."""
        return self.artifact is None and self.shape.partition(":")[0] in DEEP

    @property
    def is_shared(self) -> bool:
        """Whether a batch decides together."""
        own = self.artifact is not None and shares(self.artifact.policy)
        return bool(self.budget) or own

    @property
    def fields(self) -> tuple[str, ...]:
        """Settings that are searched."""
        return (*self.shape_grid, *self.budget_grid)

    def settings(self) -> Iterator[tuple[Settings, Settings]]:
        """Every point of the grid, of the shape and of the budget."""
        budgets = {name: v for name, v in self.budget_grid.items() if isinstance(v, tuple)}
        assert len(budgets) == len(self.budget_grid), "scaled grids are made absolute first"
        points = product(*self.shape_grid.values(), *budgets.values())
        for point in points:
            shape = dict(zip(self.shape_grid, point, strict=False))
            yield shape, dict(zip(budgets, point[len(shape) :], strict=True))


def parse_families(
    names: Sequence[str], grids: Sequence[str], pair: PairFingerprint | None = None
) -> list[Family]:
    """The families that a user named, their grids replaced where `--grid` says so.

    Args:
        names: words of `policy_spec`, or folders of artifacts.
        grids: `field=v1,v2` each.
        pair: that artifacts must be of.

    Raises:
        UsageError: an unknown or repeated family, or a grid that no family has a setting for.
        ArtifactError: an artifact that must not be loaded.
    """
    if len(set(names)) < len(names):
        raise _refused("--family", "each of them once", ", ".join(names), "remove the repeated one")
    families = [_family(name, pair) for name in names]
    given = dict(_override(text) for text in grids)
    for name, values in given.items():
        if not any(name in family.fields for family in families):
            known = sorted({known for family in families for known in family.fields})
            expected = f"a setting that is searched: {', '.join(known) or 'none'}"
            raise _refused("--grid", expected, name, "check the name, or name its family")
        families = [_replaced(family, name, values) for family in families]
    return families


def listed_families(names: Sequence[str], grids: Sequence[str]) -> list[Family]:
    """Those named, or everything that can be."""
    signals = (f"stop:signal={signal}" for signal in SIGNALS)
    known = (*SHAPES, *signals, *(f"eagle2+{budget}" for budget in BUDGETS))
    return parse_families(names or known, grids)


def static_families(top_k: int) -> list[Family]:
    """Always in the race, whole: what any other policy has to beat.

    Args:
        top_k: of the log, the one width that a log which is not nested tells of.
    """
    plain, chain, tree = (_family(name, None) for name in STATIC)
    widths = tuple(dict.fromkeys((*tree.shape_grid["top_k"], str(top_k))))
    return [plain, chain, _replaced(tree, "top_k", widths)]


def _family(name: str, pair: PairFingerprint | None) -> Family:
    shape, *budgets = pieces(name)
    if len(budgets) > 1:
        raise _refused(f"--family {name}", "one budget at most", str(len(budgets)), "name one")
    budget = budgets[0] if budgets else ""
    budget_grid = _budget_grid(name, budget) if budget else {}
    if os.path.isdir(shape):
        return _artifact_family(name, shape, budget, budget_grid, pair)
    grid = _shape_grid(name, shape, is_shared=bool(budget))
    return Family(name, shape, budget, _free(grid, shape), budget_grid)


def _budget_grid(name: str, budget: str) -> dict[str, Any]:
    word = budget.partition(":")[0]
    if word not in BUDGETS:
        raise _refused(f"--family {name}", f"a budget among {', '.join(BUDGETS)}", word, "name one")
    return _free(BUDGETS[word], budget)


def _shape_grid(name: str, shape: str, *, is_shared: bool) -> Grid:
    word = shape.partition(":")[0]
    if word == "stop":
        signal = _settings(shape).get("signal", "")
        if signal not in SIGNALS:
            expected = f"stop:signal= one of {', '.join(SIGNALS)}"
            raise _refused(f"--family {name}", expected, signal or "none", "name one")
        return SIGNALS[signal]
    grids = {"ar": Grid(), **SHAPES, **(SHARED_SHAPES if is_shared else {})}
    if word not in grids:
        known = f"{', '.join((*SHAPES, 'stop'))}, maybe + a budget, or the folder of an artifact"
        raise _refused("--family", known, repr(name), "check the name or the path")
    return grids[word]


def _artifact_family(
    name: str,
    folder: str,
    budget: str,
    budget_grid: dict[str, Any],
    pair: PairFingerprint | None,
) -> Family:
    artifact = resolve_policy(folder, pair, allow_lossy=True)
    check_replayable(artifact.policy.model_copy(update={"budget": PerRequest()}))
    grid = fitted_grid(artifact.policy.shape, is_shared=bool(budget))
    return Family(name, folder, budget, grid, budget_grid, artifact)


def _free(grid: Mapping[str, Any], words: str) -> dict[str, Any]:
    """The settings that the words do not fix."""
    fixed = _settings(words)
    return {name: values for name, values in grid.items() if name not in fixed}


def _settings(words: str) -> Settings:
    """Values by setting, of a name with settings; `policy_spec` judges them."""
    parts = (word.partition("=") for word in words.split(":")[1:])
    return {name: value for name, _, value in parts}


def _replaced(family: Family, name: str, values: tuple[str, ...]) -> Family:
    if name in family.shape_grid:
        return replace(family, shape_grid={**family.shape_grid, name: values})
    if name in family.budget_grid:
        return replace(family, budget_grid={**family.budget_grid, name: values})
    return family


def _override(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, values = text.partition("=")
    words = tuple(dict.fromkeys(word.strip() for word in values.split(",")))
    if not name or not all(words):
        raise _refused("--grid", "field=v1,v2,...", repr(text), "separate values by commas")
    return name.strip(), words


def _refused(what: str, expected: str, found: str, fix: str) -> UsageError:
    return UsageError(what, expected=expected, found=found, fix=fix)
