"""Candidates of a search: from the name of a family to the settings of its grid."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import UsageError
from specctl.logs.tree_log import Support
from specctl.policy import (
    EntropyBins,
    PerRequest,
    Policy,
    Shape,
    StepCost,
    build_shape,
    parse_policy,
    with_costs,
)
from specctl.policy import families as policy_families
from specctl.policy.family import Grid, Scaled
from specctl.policy.rules import ShapeRule
from specctl.records import canonical_json
from specctl.replay.outcomes import check_replayable
from specctl.replay.submissions import shares
from specctl.replay.tune.objective import refused
from specctl.runtime.policy_spec import NamedPolicy, pieces, record_of, resolve_policy

STATIC = tuple(known.kind for known in policy_families.SHAPES if known.is_static)
"""Families that nothing is learned for and that never look at a draft to decide."""
DEEP = tuple(known.kind for known in policy_families.SHAPES if known.is_deep)
"""Shapes whose records demand more nodes than levels."""
_GRIDS = {
    word: cast(Grid, grid) for known in policy_families.SHAPES for word, grid in known.grids.items()
}
SHAPES = {word: grid for word, grid in _GRIDS.items() if ":" not in word and grid}
"""Grids by the word of a shape, as the families state them (`specctl.policy.family.Family`)."""
SIGNALS = {
    word.removeprefix("stop:signal="): grid
    for word, grid in _GRIDS.items()
    if word.startswith("stop:signal=")
}
"""Of `stop`, whose threshold has the unit of its signal."""
BUDGETS = {word: dict(grid) for f in policy_families.BUDGETS for word, grid in f.grids.items()}
BY_COSTS = "by step costs"
"""Of `max_tokens`: none is given, so the step costs decide alone."""
MAX_SETTINGS = 4096
"""Of one family; more is a slip of the keyboard."""
NONE = "none"
"""How a setting that is not set is written."""
_PLACES = {
    (known.kind, name): place
    for known in policy_families.SHAPES
    for name, place in known.places.items()
}
"""Where a setting stands in its record, if not at the top."""
Settings = dict[str, str]
StepCosts = Callable[[ShapeRule], StepCost]
"""Whole rounds of the load's batch by size, for drafts of a shape."""


@dataclass(frozen=True)
class SearchedFamily:
    """A policy whose settings are searched.

    Attributes:
        name: as it was given, e.g. `svip:window=8`, `eagle2+survival` or an artifact's folder.
        shape, budget: words before and behind the `+`; no budget is empty.
        shape_grid, budget_grid: searched values of each. `Scaled` until the load is known.
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
        """Whether its settings are scored by sweep, as the baseline of all others."""
        word = self.shape.partition(":")[0]
        return self.artifact is None and not self.budget and word in STATIC

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
        for point in product(*self.shape_grid.values(), *budgets.values()):
            shape = dict(zip(self.shape_grid, point, strict=False))
            yield shape, dict(zip(budgets, point[len(shape) :], strict=True))

    def contradicts(self, shape: Settings) -> bool:
        """Whether a tree that must reach its deepest level has no more nodes than levels, or a
        fitted record does not allow the settings."""
        if self.artifact is not None:
            try:
                with_settings(self.artifact.policy, shape)
            except UsageError:
                return True
            return False
        given = {**_settings(self.shape), **shape}
        depth, size = given.get("depth", ""), given.get("num_tokens", "")
        is_deep = self.shape.partition(":")[0] in DEEP
        return is_deep and depth.isdigit() and size.isdigit() and int(size) <= int(depth)


# ---------------------------------------------------------------------------------- from names


def parse_families(
    names: Sequence[str], grids: Sequence[str], pair: PairFingerprint | None = None
) -> list[SearchedFamily]:
    """The families that a user named, their grids replaced where `--grid` says so.

    Args:
        names: words of `policy_spec`, or folders of artifacts.
        grids: `field=v1,v2` each.
        pair: that artifacts must be of.
    """
    if len(set(names)) < len(names):
        raise refused("--family", "each of them once", ", ".join(names), "remove the repeated one")
    families = [_family(name, pair) for name in names]
    given: dict[str, tuple[str, ...]] = {}
    for text in grids:
        name, _, values = text.partition("=")
        words = tuple(dict.fromkeys(word.strip() for word in values.split(",")))
        if not name or not all(words):
            fix = "separate values by commas"
            raise refused("--grid", "field=v1,v2,...", repr(text), fix)
        given[name.strip()] = words
    for name, words in given.items():
        if not any(name in family.fields for family in families):
            known = sorted({known for family in families for known in family.fields})
            expected = f"a setting that is searched: {', '.join(known) or 'none'}"
            raise refused("--grid", expected, name, "check the name, or name its family")
        families = [_replaced(family, name, words) for family in families]
    return families


def listed_families(names: Sequence[str], grids: Sequence[str]) -> list[SearchedFamily]:
    """The named families, or all that there are."""
    signals = (f"stop:signal={signal}" for signal in SIGNALS)
    known = (*SHAPES, *signals, *(f"eagle2+{budget}" for budget in BUDGETS))
    return parse_families(names or known, grids)


def static_families(top_k: int) -> list[SearchedFamily]:
    """The static families, always searched and whole: the baseline of any other policy.

    Args:
        top_k: of the log, the one width that a log which is not nested supports.
    """
    plain, chain, tree = (_family(name, None) for name in STATIC)
    widths = tuple(dict.fromkeys((*tree.shape_grid["top_k"], str(top_k))))
    return [plain, chain, _replaced(tree, "top_k", widths)]


def grid_rows(family: SearchedFamily) -> list[tuple[str, str]]:
    """Setting and values of one family, in words."""
    rows = []
    for name, values in {**family.shape_grid, **family.budget_grid}.items():
        if isinstance(values, Scaled):
            factors = ", ".join(f"{factor:g}" for factor in values.factors)
            values = (*values.as_is, f"{factors} × {values.unit}")
        rows.append((name, ", ".join(values)))
    return rows or [("none", "as it is")]


def _family(name: str, pair: PairFingerprint | None) -> SearchedFamily:
    shape, *budgets = pieces(name)
    if len(budgets) > 1:
        raise refused(f"--family {name}", "one budget at most", str(len(budgets)), "name one")
    budget = budgets[0] if budgets else ""
    budget_grid: dict[str, Any] = {}
    if budget:
        word = budget.partition(":")[0]
        if word not in BUDGETS:
            expected = f"a budget among {', '.join(BUDGETS)}"
            raise refused(f"--family {name}", expected, word, "name one")
        budget_grid = _free(BUDGETS[word], budget)
    if os.path.isdir(shape):
        artifact = resolve_policy(shape, pair, allow_lossy=True)
        check_replayable(artifact.policy.model_copy(update={"budget": PerRequest()}))
        grid = fitted_grid(artifact.policy.shape, is_shared=bool(budget))
        return SearchedFamily(name, shape, budget, grid, budget_grid, artifact)
    word = shape.partition(":")[0]
    shared = {known.kind: known.shared_grid for known in policy_families.SHAPES}
    coarser = {kind: grid for kind, grid in shared.items() if grid and budget}
    grids = {"ar": Grid(), **SHAPES, **coarser}
    if word == "stop":
        signal = _settings(shape).get("signal", "")
        if signal not in SIGNALS:
            expected = f"stop:signal= one of {', '.join(SIGNALS)}"
            raise refused(f"--family {name}", expected, signal or "none", "name one")
        grids["stop"] = SIGNALS[signal]
    if word not in grids:
        known = f"{', '.join((*SHAPES, 'stop'))}, maybe + a budget, or the folder of an artifact"
        raise refused("--family", known, repr(name), "check the name or the path")
    return SearchedFamily(name, shape, budget, _free(grids[word], shape), budget_grid)


def _free(grid: Mapping[str, Any], words: str) -> dict[str, Any]:
    """The settings that the words do not fix."""
    fixed = _settings(words)
    return {name: values for name, values in grid.items() if name not in fixed}


def _settings(words: str) -> Settings:
    """Values by setting, of a name with settings; `policy_spec` judges them."""
    parts = (word.partition("=") for word in words.split(":")[1:])
    return {name: value for name, _, value in parts}


def _replaced(family: SearchedFamily, name: str, values: tuple[str, ...]) -> SearchedFamily:
    if name in family.shape_grid:
        return replace(family, shape_grid={**family.shape_grid, name: values})
    if name in family.budget_grid:
        return replace(family, budget_grid={**family.budget_grid, name: values})
    return family


# --------------------------------------------------------------------------------- fitted shapes


def fitted_grid(shape: Shape, *, is_shared: bool = False) -> Grid:
    """The grid of a fitted shape; its own settings stand first, so that they are scored whatever
    the grid holds. Empty for a shape of which nothing is searched.

    Args:
        is_shared: it stands under a budget, which trims anyway.
    """
    known, record = policy_families.family_of(shape), shape.model_dump(mode="json")
    grid = known.fitted_grid
    own = {}
    for name in grid:
        value: Any = record
        for place in _PLACES.get((shape.kind, name), (name,)):
            value = value[place]
        own[name] = "/".join(map(str, value)) if isinstance(value, list) else str(value)
        own[name] = NONE if value is None else own[name]
    if isinstance(shape, EntropyBins) and shape.alpha is None:  # the record says: half the depth
        deepest = max((d - shape.base.depth for d in shape.plan_depths), default=0)
        own["alpha"] = str(deepest + shape.index_base)
    if is_shared:
        grid = {name: known.shared_fitted_grid.get(name, ()) for name in grid}
    return {
        name: (own[name], *(value for value in values if value != own[name]))
        for name, values in grid.items()
    }


def with_settings(policy: Policy, settings: Mapping[str, str], budget: str = "") -> Policy:
    """The policy with other settings of its shape, and another budget if words of one are given."""
    record = policy.model_dump(mode="json")
    for name, text in settings.items():
        *path, last = _PLACES.get((policy.shape.kind, name), (name,))
        place = record["shape"]
        for step in path:
            place = place[step]
        before, value = place[last], None if text == NONE else text
        if isinstance(before, list):  # of the type that the record had before
            place[last] = [float(part) for part in text.split("/")]
        elif value is None:
            place[last] = None
        else:
            place[last] = float(text) if isinstance(before, float) else int(text)
    if budget:
        record["budget"] = record_of(budget)
    return parse_policy(canonical_json(record))


# -------------------------------------------------------------------------- from grids to policies


@dataclass(frozen=True)
class PolicyCandidate:
    """One setting of a family.

    Attributes:
        label: as `specctl replay --policy` takes it; of a changed artifact, folder and changes.
        parent: digest of the artifact that it varies, if any.
    """

    family: str
    label: str
    policy: Policy
    parent: str | None = None


@dataclass(frozen=True)
class GrownFamily:
    """A family's grid as policies.

    Attributes:
        num_contradictory: points that are no policy: trees of fewer nodes than levels.
        num_beyond: settings deeper or wider than the log, left out.
    """

    family: SearchedFamily
    candidates: tuple[PolicyCandidate, ...]
    num_contradictory: int
    num_beyond: int


@dataclass(frozen=True)
class Conditions:
    """The pair, the log and the load that candidates must fit.

    Attributes:
        batch_size: of the load; scales the sizes of budgets.
        step_costs: for budgets that weigh tokens against time.
        tokens_per_s: best static rate of the whole batch; scales the rates of budgets.
    """

    pair: PairFingerprint
    support: Support
    batch_size: int
    step_costs: StepCosts
    tokens_per_s: float | None = None


def grow(
    family: SearchedFamily, conditions: Conditions, *, may_be_empty: bool = False
) -> GrownFamily:
    """Every policy of a family's grid that the log supports.

    Args:
        may_be_empty: a grid wholly outside the log is no error.
    """
    units = {"batch size": conditions.batch_size, "best static rate": conditions.tokens_per_s}
    grid: dict[str, Any] = {}
    for name, values in family.budget_grid.items():
        if isinstance(values, Scaled):
            unit = units[values.unit]
            assert unit is not None, (
                "static settings are scored before budgets that need their rate"
            )
            values = (*values.as_is, *(f"{factor * unit:.6g}" for factor in values.factors))
        grid[name] = values
    family = replace(family, budget_grid=grid)
    points = []
    for point in family.settings():
        points.append(point)
        if len(points) > MAX_SETTINGS:
            raise refused(
                f"grid of {family.name}",
                f"at most {MAX_SETTINGS} settings",
                "more",
                "fix some of them, e.g. svip:window=8, or give fewer values with --grid",
            )
    sound = [point for point in points if not family.contradicts(point[0])]
    candidates = [_candidate(family, *point, conditions) for point in sound]
    support, inside = conditions.support, []
    for candidate in candidates:
        rule = build_shape(candidate.policy.shape)
        if rule.max_depth <= support.depth and rule.top_k <= support.top_k:
            inside.append(candidate)
    if not (inside or may_be_empty):
        raise refused(
            f"--family {family.name}",
            f"settings within the log's {support.depth} levels and top_k {support.top_k}",
            f"all {len(candidates)} of its grid beyond them",
            "collect a deeper or wider log, or give smaller values with --grid",
        )
    num_contradictory = len(points) - len(sound)
    return GrownFamily(family, tuple(inside), num_contradictory, len(candidates) - len(inside))


def _candidate(
    family: SearchedFamily, shape: Settings, budget: Settings, conditions: Conditions
) -> PolicyCandidate:
    def costs(record: Shape) -> StepCost:
        return conditions.step_costs(build_shape(record))

    budget_words = _spec(family.budget, budget) if family.budget else ""
    label = "+".join(filter(None, [_spec(family.shape, shape), budget_words]))
    if family.artifact is not None:  # the artifact's policy with other settings
        policy = with_costs(with_settings(family.artifact.policy, shape, budget_words), costs)
        return PolicyCandidate(family.name, label, policy, family.artifact.artifact_digest)
    named = resolve_policy(_spec(family.shape, shape), conditions.pair)
    if family.budget:
        named = resolve_policy(label, conditions.pair, step_cost=costs(named.policy.shape))
    return PolicyCandidate(family.name, label, named.policy)


def _spec(words: str, settings: Settings) -> str:
    given = [f"{name}={value}" for name, value in settings.items() if value != BY_COSTS]
    return ":".join([words, *given])
