"""From a record to the rule that decides."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from specctl.errors import UsageError
from specctl.policy.adasd import entropy_stop_shape, jensen_shannon_rule
from specctl.policy.best_first import opt_tree_shape
from specctl.policy.calibration import calibration_table
from specctl.policy.elastic import ElasticRule
from specctl.policy.full import full_shape
from specctl.policy.gates import sparse_gates_shape
from specctl.policy.hetero import entropy_bins_shape
from specctl.policy.marginal import MarginalRule
from specctl.policy.mars import mars_acceptance
from specctl.policy.records import (
    Acceptance,
    Budget,
    Chain,
    DynamicDepth,
    ElasticBudget,
    EntropyBins,
    EntropyStop,
    FullTree,
    JointThreshold,
    MarginalBudget,
    Mars,
    OptTree,
    PerRequest,
    Policy,
    RootOnly,
    ScoredTree,
    Shape,
    SignalStop,
    SparseGates,
    StaticTree,
    StepCost,
    Strict,
    SurvivalBudget,
)
from specctl.policy.rules import BudgetRule, ShapeRule
from specctl.policy.scored import scored_shape
from specctl.policy.sharing import PerRequestRule
from specctl.policy.static import static_shape
from specctl.policy.stops import dynamic_depth_shape, signal_stop_shape
from specctl.policy.survival import SurvivalRule
from specctl.policy.threshold import joint_threshold_shape
from specctl.policy.verification import AcceptanceRule, StrictAcceptance

_SHAPES: dict[type[Any], Callable[[Any, torch.device], ShapeRule]] = {
    RootOnly: static_shape,
    Chain: static_shape,
    StaticTree: static_shape,
    FullTree: full_shape,
    EntropyBins: entropy_bins_shape,
    ScoredTree: scored_shape,
    SparseGates: sparse_gates_shape,
    EntropyStop: entropy_stop_shape,
    SignalStop: signal_stop_shape,
    DynamicDepth: dynamic_depth_shape,
    OptTree: opt_tree_shape,
    JointThreshold: joint_threshold_shape,
}


def build_shape(shape: Shape, device: torch.device | str = "cpu") -> ShapeRule:
    """The rule that decides for a shape record, its tables on `device`."""
    return _SHAPES[type(shape)](shape, torch.device(device))


def build_acceptance(
    acceptance: Acceptance, device: torch.device | str = "cpu", *, eos_ids: Collection[int] = ()
) -> AcceptanceRule:
    """The rule that decides for an acceptance record, its tables on `device`.

    Args:
        eos_ids: tokens that end a text, which no lossy rule may accept or skip on its own.
    """
    if isinstance(acceptance, Strict):
        return StrictAcceptance()
    if isinstance(acceptance, Mars):
        return mars_acceptance(acceptance, torch.device(device), eos_ids)
    return jensen_shannon_rule(acceptance, torch.device(device), eos_ids)


def build_budget(
    budget: Budget, *, batch_size: int, max_tokens: int, device: torch.device | str = "cpu"
) -> BudgetRule:
    """The rule that decides for a budget record, its tables on `device`.

    Args:
        batch_size: requests that share the budget at most.
        max_tokens: nodes that one of them submits at most, root counted.

    Raises:
        UsageError: a cost table that is missing or says nothing about the sizes that may occur,
            or fewer tokens than requests.
    """
    if isinstance(budget, PerRequest):
        return PerRequestRule()
    if isinstance(budget, ElasticBudget):
        _check_roots(budget, batch_size)
        by_row = budget.order == "row"
        return ElasticRule(budget.max_tokens, budget.default_width, budget.max_width, by_row)
    check_costs(budget)
    most, place = batch_size * max_tokens, torch.device(device)
    table = calibration_table(budget.calibration, place) if budget.calibration else None
    if isinstance(budget, MarginalBudget):
        assert budget.costs is not None
        step_us = budget.costs.step_table(most).to(place)
        return MarginalRule(budget.tokens_per_s / 1e6, step_us, table)
    _check_roots(budget, batch_size)
    most = min(most, budget.max_tokens or most)
    costs = budget.costs.step_table(most).to(place) if budget.costs else None
    return SurvivalRule(budget.max_tokens, costs, table)


def check_costs(budget: Budget) -> None:
    """Refuses a budget that weighs tokens against time without knowing the time.

    A flat guess would not do: it makes every token free and verifies all (SGLang PR 35413).
    """
    if isinstance(budget, SurvivalBudget | MarginalBudget) and budget.lacks_costs:
        raise UsageError(
            f"budget {budget.kind}",
            expected="a table of step costs to decide by",
            found="none",
            fix="measure one with `specctl profile` and give it"
            + (", or fix max_tokens" if isinstance(budget, SurvivalBudget) else ""),
        )


StepCosts = Callable[[Shape], StepCost]
"""Step costs of a batch by size, for drafts of a shape."""


def with_costs(policy: Policy, costs: StepCost | StepCosts) -> Policy:
    """The policy with a table of step costs where its budget lacks one; else the same.

    Args:
        costs: the table, or what gives the table of a shape; asked only where it is needed.
    """
    budget = policy.budget
    if isinstance(budget, SurvivalBudget | MarginalBudget) and budget.lacks_costs:
        table = costs if isinstance(costs, StepCost) else costs(policy.shape)
        return policy.model_copy(update={"budget": budget.model_copy(update={"costs": table})})
    return policy


def _check_roots(budget: SurvivalBudget | ElasticBudget, batch_size: int) -> None:
    if budget.max_tokens is not None and budget.max_tokens < batch_size:
        raise UsageError(
            f"max_tokens of budget {budget.kind}",
            expected=f"at least the batch size, {batch_size}: every root is verified",
            found=str(budget.max_tokens),
            fix="raise it, or decode fewer requests together",
        )
