"""Budgets that weigh expected tokens against time: the rate of one step, or the long-run rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from specctl.errors import UsageError
from specctl.features import DraftPool
from specctl.lazy import Tensor, torch
from specctl.policy.budgets import (
    Calibration,
    CalibrationTable,
    StepCost,
    calibration_table,
    check_roots,
    keep_first,
    rank_batch,
)
from specctl.policy.family import Budget, Family, Scaled
from specctl.policy.rules import Plan
from specctl.records import PositiveInt


class CostedBudget(Budget):
    """A choice of the likeliest nodes of a batch, as many as their time is worth.

    Attributes:
        costs: time of a round by its size.
        calibration: from draft probability to acceptance; where absent, the draft probability
            is taken as it is.
    """

    costs: StepCost | None = None
    calibration: Calibration | None = None

    @property
    def lacks_costs(self) -> bool:
        """Whether the size cannot be decided for want of a cost table."""
        return self.costs is None


class SurvivalBudget(CostedBudget):
    """Global top slots by joint acceptance probability (vLLM PR 47808; DSpark, arXiv:2607.05147).

    Both rank the slots of chains so and take the size of most expected tokens per profiled step
    cost; here over trees.

    Attributes:
        max_tokens: nodes verified per round over the batch, roots counted, hence at least the
            batch size; where absent, only the costs decide.
        costs: where given, the size of most expected tokens per time is taken, within
            `max_tokens`.
    """

    kind: Literal["survival"] = "survival"
    max_tokens: PositiveInt | None = None

    @property
    def lacks_costs(self) -> bool:
        return self.max_tokens is None and self.costs is None


class MarginalBudget(CostedBudget):
    """Verify a node iff its joint acceptance is at least rate · marginal cost.

    With the long-run rate of the load as the price of time this maximises long-run tokens per
    time, where the rate of the single step (`SurvivalBudget`) speculates too much in hard
    contexts and too little in easy ones (notes/state-of-the-art.md, 2.2, Dinkelbach).

    Attributes:
        tokens_per_s: λ, the long-run rate of the whole batch at this load; the fixed point is
            where the rate that the rule achieves is the one it was given.
    """

    kind: Literal["marginal"] = "marginal"
    tokens_per_s: Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class CostedRule:
    """The likeliest nodes of a batch, of the size that pays best.

    Attributes:
        step_us: `[S + 1]` float64, us of a round that verifies so many; None for `max_tokens`.
        tokens_per_us: the price of time; None maximises the rate of the step.
    """

    max_tokens: int | None
    step_us: Tensor | None
    tokens_per_us: float | None
    calibration: CalibrationTable | None

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        del plan
        ranking = rank_batch(pool, submitted, self.calibration)
        size: Tensor | int = len(ranking.order)
        if self.max_tokens is not None:
            size = min(len(ranking.order), self.max_tokens - len(submitted))
        if self.step_us is not None:
            tokens, step_us = ranking.expected_tokens[: size + 1], self.step_us[len(submitted) :]
            if self.tokens_per_us is None:
                size = best_rate(tokens, step_us)
            else:
                size = best_surplus(tokens, step_us, self.tokens_per_us)
        return keep_first(submitted, ranking.order, size)


def best_rate(expected_tokens: Tensor, step_us: Tensor) -> Tensor:
    """`[]` int64: the number of draft nodes m that maximises expected tokens over step time.

    The maximum over all sizes: a cost with stairs has many local ones, and the first descent
    would stop at the first step (TensorRT-LLM PR 17056). Of equal rates the smaller size wins.

    Args:
        expected_tokens: `[M + 1]`. step_us: `[M + 1]` or more, both by m.
    """
    return (expected_tokens / step_us[: len(expected_tokens)]).argmax()


def best_surplus(expected_tokens: Tensor, step_us: Tensor, tokens_per_us: float) -> Tensor:
    """`[]` int64: the number of draft nodes m that maximises tokens less the price of time.

    Over all sizes, since the marginal cost of a staircase is 0 on a stair and a jump behind it.
    Of equal sizes the larger wins: a node that just pays is verified.
    """
    surplus = expected_tokens - tokens_per_us * step_us[: len(expected_tokens)]
    return len(surplus) - 1 - surplus.flip(0).argmax()


def costed_rule(
    record: SurvivalBudget | MarginalBudget, batch_size: int, max_tokens: int, device: torch.device
) -> CostedRule:
    """The rule of a record whose costs are known."""
    check_costs(record)
    most = record.max_tokens if isinstance(record, SurvivalBudget) else None
    price = record.tokens_per_s / 1e6 if isinstance(record, MarginalBudget) else None
    check_roots(record.kind, most, batch_size)
    table = None if record.calibration is None else calibration_table(record.calibration, device)
    size = min(batch_size * max_tokens, most or batch_size * max_tokens)
    return CostedRule(
        max_tokens=most,
        step_us=None if record.costs is None else record.costs.step_table(size).to(device),
        tokens_per_us=price,
        calibration=table,
    )


def check_costs(budget: Budget) -> None:
    """Refuses a budget that weighs tokens against time without knowing the time.

    A flat guess would not do: it makes every token free and verifies all (SGLang PR 35413).
    """
    if isinstance(budget, CostedBudget) and budget.lacks_costs:
        raise UsageError(
            f"budget {budget.kind}",
            expected="a table of step costs to decide by",
            found="none",
            fix="measure one with `specctl profile` and give it"
            + (", or fix max_tokens" if isinstance(budget, SurvivalBudget) else ""),
        )


SURVIVAL = Family(
    record=SurvivalBudget,
    rule=costed_rule,
    words={"survival": {}},
    grids={
        "survival": {
            "max_tokens": Scaled((2, 3, 4, 6, 8, 12, 16, 24), "batch size", ("by step costs",))
        }
    },
)
MARGINAL = Family(
    record=MarginalBudget,
    rule=costed_rule,
    words={"marginal": {}},
    grids={
        "marginal": {
            "tokens_per_s": Scaled((0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3), "best static rate")
        }
    },
)
