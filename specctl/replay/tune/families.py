"""From the name of a family to the settings that its grid holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import UsageError
from specctl.policy.records import EntropyBins, PerRequest
from specctl.replay.batch.submissions import shares
from specctl.replay.outcomes import check_replayable
from specctl.replay.tune.grids import (
    BUDGETS,
    HETERO,
    SHAPES,
    SHARED_SHAPES,
    SIGNALS,
    Grid,
    Scaled,
)
from specctl.runtime.policy_spec import NamedPolicy, resolve_policy

STATIC = ("ar", "chain", "eagle2")
"""Families that nothing is learned for and that never look at a draft to decide."""
DEEP = ("eagle2", "ddd")
"""Shapes whose records demand more nodes than levels."""
Settings = dict[str, str]
"""Values by setting, as they are written behind a name."""


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
        if self.artifact is None:
            return _settings(self.shape)
        shape = self.artifact.policy.shape
        return {"depth": str(shape.base.depth)} if isinstance(shape, EntropyBins) else {}

    @property
    def is_deep(self) -> bool:
        """Whether its trees must hold more nodes than levels."""
        return self.artifact is not None or self.shape.partition(":")[0] in DEEP

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
    if os.path.isdir(name):
        return _artifact_family(name, pair)
    shape, _, budget = name.partition("+")
    grid = _shape_grid(name, shape, is_shared=bool(budget))
    if not budget:
        return Family(name, shape, "", _free(grid, shape))
    word = budget.partition(":")[0]
    if word not in BUDGETS:
        raise _refused(f"--family {name}", f"a budget among {', '.join(BUDGETS)}", word, "name one")
    return Family(name, shape, budget, _free(grid, shape), _free(BUDGETS[word], budget))


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


def _artifact_family(name: str, pair: PairFingerprint | None) -> Family:
    """Its own settings stand first in the grid, so that they are looked at whatever it holds."""
    artifact = resolve_policy(name, pair, allow_lossy=True)
    check_replayable(artifact.policy.model_copy(update={"budget": PerRequest()}))
    shape = artifact.policy.shape
    if not isinstance(shape, EntropyBins):
        return Family(name, name, "", {}, artifact=artifact)
    own = artifact_settings(shape)
    num_gammas = len(shape.edges) + 1
    grid = {
        field: (own[field], *(v for v in values if v != own[field] and v.count("/") < num_gammas))
        for field, values in HETERO.items()
    }
    return Family(name, name, "", grid, artifact=artifact)


def artifact_settings(shape: EntropyBins) -> Settings:
    """What a fitted record has where the grid would change it."""
    alpha = max((d - shape.base.depth for d in shape.plan_depths), default=0) + shape.index_base
    return {
        "num_tokens": str(shape.base.num_tokens),
        "alpha": str(alpha if shape.alpha is None else shape.alpha),
        "gammas": "/".join(map(str, shape.gammas)),
    }


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
