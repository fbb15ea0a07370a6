"""Candidates of a search: from the names of families to the settings of their grids."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import UsageError, check_choice, did_you_mean
from specctl.formatting import Table
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
from specctl.policy.families import BUDGETS, SHAPES, WORDS, shape_family
from specctl.policy.family import Grid, Scaled
from specctl.records import canonical_json
from specctl.replay.outcomes import check_replayable
from specctl.replay.submissions import shares
from specctl.replay.tune.verdict import FamilySearch
from specctl.runtime.words import (
    NamedPolicy,
    fitted_folders,
    part_of,
    pieces,
    record_of,
    resolve_policy,
    settings_of,
    spec_of,
)

Values = tuple[str, ...] | Scaled
Settings = Mapping[str, str]
STATIC = tuple(family.kind for family in SHAPES if family.is_static)
"""Families without learned parts whose drafts are fixed beforehand."""
DEEP = tuple(family.kind for family in SHAPES if family.is_deep)
"""Shapes whose records need more nodes than levels."""
SHAPE_GRIDS = {word: dict(grid) for family in SHAPES for word, grid in family.grids.items()}
"""Grids by the word of a shape; `stop` has one for each signal, e.g. `stop:signal=entropy`."""
BUDGET_GRIDS = {word: dict(grid) for family in BUDGETS for word, grid in family.grids.items()}
SHARED_GRIDS = {family.kind: family.shared_grid for family in SHAPES if family.shared_grid}
"""Coarser grids of shapes under a budget, which trims them anyway."""
BY_COSTS = "by step costs"
"""Value of `max_tokens` without a cap: the step costs decide alone."""
MAX_SETTINGS = 4096
"""Most settings of one family; more is a typing error."""
NONE = "none"
"""Written form of an unset setting."""


@dataclass(frozen=True)
class SearchedFamily:
    """A policy whose settings are searched."""

    name: str  # as given, e.g. `svip:window=8`, `eagle2+survival` or an artifact's folder
    # shape, budget: words before and behind the `+`; an empty budget for none
    shape: str
    budget: str
    # values of the searched settings, the shape's before the budget's; `Scaled` until the load is
    # known
    grid: Mapping[str, Values]
    artifact: NamedPolicy | None = None  # loaded from the folder `shape`

    @property
    def word(self) -> str:
        """The shape's own name, without settings."""
        return self.shape.partition(":")[0]

    @property
    def is_static(self) -> bool:
        """Whether its settings are candidates for the baseline."""
        return self.artifact is None and not self.budget and self.word in STATIC

    @property
    def is_shared(self) -> bool:
        """Whether requests of a batch share a budget."""
        own = self.artifact is not None and shares(self.artifact.policy)
        return bool(self.budget) or own

    def replaced(self, name: str, values: tuple[str, ...]) -> SearchedFamily:
        """The family with other values of a setting; unchanged without that setting."""
        return replace(self, grid={**self.grid, name: values}) if name in self.grid else self

    def grid_rows(self) -> list[tuple[str, str]]:
        """Settings and their values, in words."""
        rows = []
        for name, values in self.grid.items():
            if isinstance(values, Scaled):
                factors = ", ".join(f"{factor:g}" for factor in values.factors)
                values = (*values.as_is, f"{factors} × {values.unit}")
            rows.append((name, ", ".join(values)))
        return rows or [("none", "as it is")]


FEW_FAMILIES = 3
"""Families whose values fit a screen."""


def grid_parts(families: Sequence[SearchedFamily]) -> list[Any]:
    """Settings that are searched, with their values; of many families only with `--wide`."""
    is_long = len(families) > FEW_FAMILIES
    names = [(one.name, ", ".join(name for name, _ in one.grid_rows())) for one in families]
    rows = [(family.name, *row) for family in families for row in family.grid_rows()]
    first = [
        f"{len(families)} families; --wide or --family NAME shows the values.",
        Table("", ("family", "searched settings"), names, left=2),
    ]
    values = Table("", ("family", "setting", "values"), rows, left=3, is_detail=is_long)
    return [*(first if is_long else ()), values]


# ---------------------------------------------------------------------------------- from names


def parse_families(
    names: Sequence[str], grids: Sequence[str], pair: PairFingerprint | None = None
) -> list[SearchedFamily]:
    """The named families, with the grids that `--grid` replaces.

    Args:
        names: words of `runtime.words`, or folders of artifacts.
        grids: `field=v1,v2` each.
        pair: of the artifacts.
    """
    if len(set(names)) < len(names):
        raise UsageError(f"--family names one more than once: {', '.join(names)}")
    families = [_family(name, pair) for name in names]
    given: dict[str, tuple[str, ...]] = {}
    for text in grids:
        name, _, values = text.partition("=")
        words = tuple(dict.fromkeys(word.strip() for word in values.split(",")))
        if not name or not all(words):
            raise UsageError(f"--grid {text!r} is not of the form field=v1,v2,...")
        given[name.strip()] = words
    known = sorted({name for family in families for name in family.grid})
    for name, words in given.items():
        if name not in known:
            raise UsageError(
                f"--grid {name}: only searched settings have a grid ({', '.join(known) or 'none'})",
                hint="check the name, or name its family",
            )
        families = [family.replaced(name, words) for family in families]
    return families


def listed_families(names: Sequence[str], grids: Sequence[str]) -> list[SearchedFamily]:
    """The named families, or all of them: shapes, signals of `stop`, shared budgets."""
    searched = sorted((word for word, grid in SHAPE_GRIDS.items() if grid), key=_has_setting)
    return parse_families(names or (*searched, *(f"eagle2+{word}" for word in BUDGET_GRIDS)), grids)


def static_families(top_k: int) -> list[SearchedFamily]:
    """The static families with whole grids, for the baseline.

    Args:
        top_k: of the log; added to the widths, as a log without nested trees supports no other.
    """
    families = []
    for family in (_family(name, None) for name in STATIC):
        widths = family.grid.get("top_k")
        if isinstance(widths, tuple):
            family = family.replaced("top_k", tuple(dict.fromkeys((*widths, str(top_k)))))
        families.append(family)
    return families


def static_settings(word: str, support: Support) -> list[PolicyCandidate]:
    """The settings of a static family that a log supports."""
    [family] = (one for one in static_families(support.top_k) if one.word == word)

    return grow(family, Conditions(None, support, 1), may_be_empty=True).candidates


def _family(name: str, pair: PairFingerprint | None) -> SearchedFamily:
    shape, *budgets = pieces(name)
    if len(budgets) > 1:
        raise UsageError(f"--family {name} has {len(budgets)} budgets; name one at most")
    budget = "".join(budgets)
    budget_grid: Mapping[str, Values] = {}
    if budget:
        word = budget.partition(":")[0]
        check_choice(f"--family {name}: budget", word, BUDGET_GRIDS)
        budget_grid = _free(BUDGET_GRIDS[word], budget)
    if os.path.isdir(shape) and part_of(shape) is None:  # a word stays one
        artifact = resolve_policy(shape, pair, allow_lossy=True)
        check_replayable(artifact.policy.model_copy(update={"budget": PerRequest()}))
        own = fitted_grid(artifact.policy.shape, is_shared=bool(budget))
        return SearchedFamily(name, shape, budget, {**own, **budget_grid}, artifact)
    word = shape.partition(":")[0]
    if word == "stop":
        signal = _settings(shape).get("signal", "")
        known = [key.partition("=")[2] for key in SHAPE_GRIDS if _has_setting(key)]
        check_choice(f"--family {name}: stop:signal=", signal, known)
        word = f"stop:signal={signal}"
    if word in WORDS["acceptance"]:
        step = "compare it live: specctl run --compare"
        for fit in ("mars", "adasd"):
            step = f"fit it to answers: specctl fit {fit}" if word.startswith(fit) else step
        raise UsageError(
            f"--family {name}: an acceptance is not searched, as its texts are not the logged ones",
            hint=step,
        )
    if word not in SHAPE_GRIDS:
        searched = [key for key, grid in SHAPE_GRIDS.items() if grid and not _has_setting(key)]
        raise UsageError(
            f"--family {name!r} is neither the folder of a fit nor one of "
            f"{', '.join(searched)} and stop, with or without + a budget",
            hint=did_you_mean(
                word, [*searched, "stop", *fitted_folders()], "check the name or the path"
            ),
        )
    grid = SHARED_GRIDS.get(word, SHAPE_GRIDS[word]) if budget else SHAPE_GRIDS[word]
    return SearchedFamily(name, shape, budget, {**_free(grid, shape), **budget_grid})


def _has_setting(word: str) -> bool:
    """Whether a word of `SHAPE_GRIDS` fixes a setting, as `stop:signal=entropy` does."""
    return ":" in word


def _free(grid: Mapping[str, Values], words: str) -> dict[str, Values]:
    """The settings of a grid that the words leave free."""
    fixed = _settings(words)
    return {name: values for name, values in grid.items() if name not in fixed}


def _settings(words: str) -> dict[str, str]:
    """Values by setting, of a name with settings; `runtime.words` checks them."""
    parts = (word.partition("=") for word in settings_of(words))
    return {name: value for name, _, value in parts}


# --------------------------------------------------------------------------------- fitted shapes


def fitted_grid(shape: Shape, *, is_shared: bool = False) -> Grid:
    """The grid of a fitted shape, its own settings first; empty if nothing is searched.

    Args:
        is_shared: under a budget; its own settings and a coarser grid.
    """
    family, record = shape_family(shape), shape.model_dump(mode="json")
    found: Grid = {}
    for name, values in family.fitted_grid.items():
        own: Any = record
        for place in family.places.get(name, (name,)):
            own = own[place]
        if name == "alpha" and own is None and isinstance(shape, EntropyBins):
            # None in the record: half the depth.
            deepest = max((d - shape.base.depth for d in shape.plan_depths), default=0)
            own = deepest + shape.index_base
        text = "/".join(map(str, own)) if isinstance(own, list) else str(own)
        text = NONE if own is None else text
        if is_shared:
            values = family.shared_fitted_grid.get(name, ())
        found[name] = tuple(dict.fromkeys((text, *values)))
    return found


def with_settings(policy: Policy, settings: Settings) -> Policy:
    """The policy with other settings of its shape."""
    record, places = policy.model_dump(mode="json"), shape_family(policy.shape).places
    for name, text in settings.items():
        *path, last = places.get(name, (name,))
        place = record["shape"]
        for step in path:
            place = place[step]
        if isinstance(place[last], list):
            place[last] = [float(part) for part in text.split("/")]
        else:
            place[last] = None if text == NONE else json.loads(text)
    return parse_policy(canonical_json(record))


# -------------------------------------------------------------------------- from grids to policies


@dataclass(frozen=True)
class PolicyCandidate:
    """One setting of a family."""

    family: str
    label: str  # as for `specctl replay --policy`; of an artifact, its folder and the changes
    policy: Policy
    parent: str | None = None  # digest of the artifact that it varies


class Grown(NamedTuple):
    """A family's grid as policies, and the counts of its points."""

    candidates: list[PolicyCandidate]
    searched: FamilySearch


@dataclass(frozen=True)
class Conditions:
    """The pair, the log, the load and the engine that candidates must fit."""

    pair: PairFingerprint | None
    support: Support
    batch_size: int  # of the load; scales the sizes of budgets
    # whole rounds of the load's batch by size, for budgets over drafts of a shape
    step_costs: Callable[[Shape], StepCost] | None = None
    # best static rate of the whole batch; scales the rates of budgets
    tokens_per_s: float | None = None
    # whether the engine of the search runs a policy; None for our own loop, which runs all
    runs: Callable[[Policy], bool] | None = None


def grow(family: SearchedFamily, conditions: Conditions, *, may_be_empty: bool = False) -> Grown:
    """Every policy of a family's grid that the log supports and the engine runs.

    Args:
        may_be_empty: accept a grid without any such policy.
    """
    support, runs, inside = conditions.support, conditions.runs, []
    num_out_of_range = num_not_run = 0
    for point in _points(family, conditions):
        candidate = _candidate(family, point, conditions)
        if candidate is None:
            continue
        if runs is not None and not runs(candidate.policy):
            num_not_run += 1
            continue
        rule = build_shape(candidate.policy.shape)
        if rule.max_depth <= support.depth and rule.top_k <= support.top_k:
            inside.append(candidate)
        else:
            num_out_of_range += 1
    if not (inside or may_be_empty) and num_not_run:
        raise UsageError(
            f"--family {family.name}: the engine of --for runs none of the {num_not_run} settings "
            "of its grid",
            hint="leave it out, or see docs/engines.md for the policies of the engine",
        )
    if not (inside or may_be_empty):
        raise UsageError(
            f"--family {family.name}: all {num_out_of_range} settings of its grid exceed the log's "
            f"{support.depth} levels and top_k {support.top_k}",
            hint="collect a deeper or wider log, or give smaller values with --grid",
        )
    searched = FamilySearch(
        family=family.name,
        num_settings=len(inside),
        num_out_of_range=num_out_of_range,
        num_unsupported=0,
        num_not_run=None if runs is None else num_not_run,
    )
    return Grown(inside, searched)


def _points(family: SearchedFamily, conditions: Conditions) -> Iterator[dict[str, str]]:
    """Every point of the grid."""
    units = {"batch size": conditions.batch_size, "best static rate": conditions.tokens_per_s}
    grid: dict[str, tuple[str, ...]] = {}
    for name, values in family.grid.items():
        if isinstance(values, Scaled):
            unit = units[values.unit]
            assert unit is not None, "static settings are scored before those that need their rate"
            values = (*values.as_is, *(f"{factor * unit:.6g}" for factor in values.factors))
        grid[name] = values
    if prod(map(len, grid.values())) > MAX_SETTINGS:
        raise UsageError(
            f"the grid of {family.name} has more than {MAX_SETTINGS} settings",
            hint="fix some of them, e.g. svip:window=8, or give fewer values with --grid",
        )
    return (dict(zip(grid, point, strict=True)) for point in product(*grid.values()))


def _candidate(
    family: SearchedFamily, point: Settings, conditions: Conditions
) -> PolicyCandidate | None:
    """The policy of a point; None for a deep tree with no more nodes than levels, and for settings
    that a fitted record forbids."""
    of_budget = BUDGET_GRIDS.get(family.budget.partition(":")[0], {})
    shape = {name: value for name, value in point.items() if name not in of_budget}
    given = {name: value for name, value in point.items() if value != BY_COSTS}
    budget = spec_of(family.budget, {name: given[name] for name in given if name in of_budget})
    label = "+".join(filter(None, [spec_of(family.shape, shape), budget]))

    if family.artifact is None:
        given = {**_settings(family.shape), **shape}
        depth, size = given.get("depth", ""), given.get("num_tokens", "")
        if family.word in DEEP and depth.isdigit() and size.isdigit() and int(size) <= int(depth):
            return None
        named = resolve_policy(label, conditions.pair, step_cost=conditions.step_costs)
        return PolicyCandidate(family.name, label, named.policy)
    try:
        policy = with_settings(family.artifact.policy, shape)
    except UsageError:
        return None
    except ValueError as error:
        raise UsageError(
            f"--grid of {label} takes numbers, with slashes in a list: {error}"
        ) from error
    if budget:
        record = {**policy.model_dump(mode="json"), "budget": record_of(budget)}
        policy = parse_policy(canonical_json(record))
    if conditions.step_costs is not None:
        policy = with_costs(policy, conditions.step_costs)
    return PolicyCandidate(family.name, label, policy, family.artifact.artifact_digest)
