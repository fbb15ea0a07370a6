"""From a family's grid to policies that the log can tell of, counted by what became of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import UsageError
from specctl.logs.tree_log import Support
from specctl.policy import Policy
from specctl.policy.build import build_shape, with_costs
from specctl.policy.records import StepCost
from specctl.policy.rules import ShapeRule
from specctl.replay.tune.families import Family
from specctl.replay.tune.fitted import Settings, contradicts, with_settings
from specctl.replay.tune.grids import BY_COSTS, MAX_SETTINGS, Scaled
from specctl.runtime.policy_spec import NamedPolicy, resolve_policy

StepCosts = Callable[[ShapeRule], StepCost]
"""Whole rounds of the load's batch by size, for drafts of a shape."""


@dataclass(frozen=True)
class Candidate:
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
class Grown:
    """A family's grid as policies.

    Attributes:
        num_contradictory: points that are no policy: trees of fewer nodes than levels.
        num_beyond: settings deeper or wider than the log, left out.
    """

    family: Family
    candidates: tuple[Candidate, ...]
    num_contradictory: int
    num_beyond: int


@dataclass(frozen=True)
class Conditions:
    """What candidates must fit.

    Attributes:
        pair: of the traces. support: of the log.
        batch_size: of the load; scales the sizes of budgets.
        step_costs: for budgets that weigh tokens against time.
        tokens_per_s: best static rate of the whole batch; scales the rates of budgets.
    """

    pair: PairFingerprint
    support: Support
    batch_size: int
    step_costs: StepCosts
    tokens_per_s: float | None = None


def grow(family: Family, conditions: Conditions, *, may_be_empty: bool = False) -> Grown:
    """Every policy of a family's grid that the log supports.

    Args:
        may_be_empty: a grid wholly outside the log is no error.

    Raises:
        UsageError: a value that the family refuses, too many settings, a policy that a log of the
            target's own text cannot tell, or a grid wholly outside the log.
        ArtifactError: an artifact of another pair.
    """
    absolute = _absolute(family, conditions)
    points = _points(absolute)
    sound = [point for point in points if not _contradicts(family, point[0])]
    candidates = [_candidate(absolute, *point, conditions) for point in sound]
    inside = [c for c in candidates if _is_inside(c.policy, conditions.support)]
    if not (inside or may_be_empty):
        raise _outside(family, conditions.support, len(candidates))
    beyond = len(candidates) - len(inside)
    return Grown(absolute, tuple(inside), len(points) - len(sound), beyond)


def _absolute(family: Family, conditions: Conditions) -> Family:
    """The family at this load."""
    units = {"batch size": conditions.batch_size, "best static rate": conditions.tokens_per_s}
    grid = {
        name: _scaled(values, units) if isinstance(values, Scaled) else values
        for name, values in family.budget_grid.items()
    }
    return replace(family, budget_grid=grid)


def _scaled(values: Scaled, units: dict[str, Any]) -> tuple[str, ...]:
    unit = units[values.unit]
    assert unit is not None, "static settings are scored before budgets that need their rate"
    return (*values.as_is, *(f"{factor * unit:.6g}" for factor in values.factors))


def _points(family: Family) -> list[tuple[Settings, Settings]]:
    points = []
    for point in family.settings():
        points.append(point)
        if len(points) > MAX_SETTINGS:
            raise UsageError(
                f"grid of {family.name}",
                expected=f"at most {MAX_SETTINGS} settings",
                found="more",
                fix="fix some of them, e.g. svip:window=8, or give fewer values with --grid",
            )
    return points


def _contradicts(family: Family, shape: Settings) -> bool:
    """Whether a tree that must reach its deepest level has no more nodes than levels, or a fitted
    record does not allow the settings."""
    if family.artifact is not None:
        return contradicts(family.artifact.policy, shape)
    given = {**family.fixed, **shape}
    depth, size = given.get("depth", ""), given.get("num_tokens", "")
    return family.is_deep and depth.isdigit() and size.isdigit() and int(size) <= int(depth)


def _candidate(
    family: Family, shape: Settings, budget: Settings, conditions: Conditions
) -> Candidate:
    if family.artifact is not None:
        return _varied(family, family.artifact, shape, budget, conditions)
    words = _spec(family.shape, shape)
    if not family.budget:
        named = resolve_policy(words, conditions.pair)
    else:
        rule = build_shape(resolve_policy(words, conditions.pair).policy.shape)
        words += "+" + _spec(family.budget, budget)
        costs = conditions.step_costs(rule)
        named = resolve_policy(words, conditions.pair, step_cost=costs)
    return Candidate(family.name, words, named.policy)


def _spec(words: str, settings: Settings) -> str:
    given = [f"{name}={value}" for name, value in settings.items() if value != BY_COSTS]
    return ":".join([words, *given])


def _varied(
    family: Family,
    artifact: NamedPolicy,
    shape: Settings,
    budget: Settings,
    conditions: Conditions,
) -> Candidate:
    """An artifact's policy with other settings."""
    words = _spec(family.budget, budget) if family.budget else ""
    policy = with_settings(artifact.policy, shape, words)
    policy = with_costs(policy, lambda record: conditions.step_costs(build_shape(record)))
    label = "+".join(filter(None, [_spec(family.shape, shape), words]))
    return Candidate(family.name, label, policy, artifact.artifact_digest)


def _is_inside(policy: Policy, support: Support) -> bool:
    rule = build_shape(policy.shape)
    return rule.max_depth <= support.depth and rule.top_k <= support.top_k


def _outside(family: Family, support: Support, num_settings: int) -> UsageError:
    return UsageError(
        f"--family {family.name}",
        expected=f"settings within the log's {support.depth} levels and top_k {support.top_k}",
        found=f"all {num_settings} of its grid beyond them",
        fix="collect a deeper or wider log, or give smaller values with --grid",
    )
