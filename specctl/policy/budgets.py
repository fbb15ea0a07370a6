"""Budgets that verify the likeliest nodes of a batch, as many as their time is worth.

ECHO's budget uses the order of nodes, step costs and calibration too."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import MAX_DEPTH, Budget, Family, Scaled
from specctl.policy.rules import Plan, in_pool_order, top_order
from specctl.records import Array, PositiveInt, Record, increasing, require
from specctl.tree import DraftPool, TokenTree, path_sum, take


class PerRequest(Budget):
    """Each request submits what its shape chose."""

    kind: Literal["per_request"] = "per_request"


class PerRequestRule:
    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        del plan, pool
        return submitted


def per_request_rule(
    record: PerRequest, batch_size: int, max_tokens: int, device: Device
) -> PerRequestRule:
    del record, batch_size, max_tokens, device
    return PerRequestRule()


PER_REQUEST = Family(record=PerRequest, rule=per_request_rule)


def check_roots(kind: str, most: int | None, batch_size: int) -> None:
    """Rejects a budget that cannot verify every root."""
    if most is not None and most < batch_size:
        raise UsageError(
            f"max_tokens {most} of budget {kind} is below the batch size, {batch_size}: "
            "every root is verified",
            hint="raise it, or decode fewer requests together",
        )


# --------------------------------------------------------------------------- the batch in order


@dataclass(frozen=True)
class Ranking:
    """The M draft nodes of a batch, likeliest first.

    Every prefix is a tree in each request, and the best choice of its size.
    """

    order: Tensor  # `[M]` int64, places in the slot-major `[N, B]` table of submitted nodes
    expected_tokens: Tensor
    """`[M + 1]` float64, tokens that the batch is expected to emit if the first m are verified,
    bonus tokens included."""


def keep_first(submitted: Tensor, order: Tensor, num_nodes: Tensor | int) -> Tensor:
    """The roots and the first `num_nodes` places of an order, in the layout of `submitted`.

    Args:
        submitted: `[B, N]`, as in `BudgetRule.share`.
        order: `[M]` int64, places in its slot-major `[N, B]` table; empty slots are dropped.
    """
    num_rows, num_slots = submitted.shape
    first = torch.arange(len(order), device=submitted.device) < num_nodes
    chosen = torch.zeros(num_slots * num_rows, dtype=torch.bool, device=submitted.device)
    chosen = chosen.scatter(0, order, first).view(num_slots, num_rows).T
    is_root = torch.arange(num_slots, device=submitted.device) == 0
    return in_pool_order(submitted, (chosen | is_root) & (submitted >= 0))


def rank_batch(pool: DraftPool, submitted: Tensor, calibration: CalibrationTable | None) -> Ranking:
    """Ranks the submitted draft nodes of a batch by the probability that their path is accepted.

    The order is slot-major: of equal nodes the one nearer its root comes first, then the one of
    the earlier request.

    Args:
        submitted: `[B, N]`, as in `BudgetRule.share`.
        calibration: of the draft probabilities; None uses them uncalibrated.
    """
    num_rows, num_slots = submitted.shape
    logp = acceptance_logp(pool, submitted, calibration)
    logp[:, 0] = float("-inf")  # roots are not ranked
    table = logp.T.reshape(1, -1)
    order = top_order(table, (num_slots - 1) * num_rows)[0]
    prob = table[0][order].double().exp()
    certain = prob.new_full((1,), num_rows)
    return Ranking(order, torch.cat([certain, prob]).cumsum(0))


def acceptance_logp(
    pool: DraftPool, submitted: Tensor, calibration: CalibrationTable | None
) -> Tensor:
    """`[B, N]` float32, nats: log-probability that a node's path is accepted; -inf in empty
    slots."""
    if calibration is None:
        logp = pool.joint_logp.gather(1, submitted.clamp(min=0))
    else:
        logp = calibration.acceptance_logp(take(pool, submitted)).float()
    return logp.masked_fill(submitted < 0, float("-inf"))


# --------------------------------------------------------------------------- step costs


Microseconds = Annotated[float, Field(gt=0)]


class StepCost(Record):
    """Time of one verification round by its size, at one batch size and context."""

    token_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    """Nodes verified over the batch, roots counted; strictly increasing, two or more."""
    step_us: tuple[Microseconds, ...]
    """Time of a whole round of each size, us; never falling."""

    @model_validator(mode="after")
    def _laws(self) -> StepCost:
        num_counts, num_times = len(self.token_counts), len(self.step_us)
        require(num_counts == num_times, f"{num_counts} token counts, {num_times} step_us")
        require(increasing(self.token_counts), "token_counts must strictly increase")
        falling = [i for i, (low, high) in enumerate(pairwise(self.step_us), 1) if high < low]
        require(not falling, f"step_us must not fall, index {falling[:1]} does")
        return self

    def step_table(self, max_tokens: int) -> Tensor:
        """Cost of every size: `[max_tokens + 1]` float64 us, entry n for n verified tokens.

        Up to the last count a staircase, as batches are padded to the next captured size: each size
        costs as much as the next count. Above it, the line through the last two counts.
        """
        counts = torch.tensor(self.token_counts, dtype=torch.float64)
        times = torch.tensor(self.step_us, dtype=torch.float64)
        last = self.token_counts[-1]
        if self.step_us[0] == self.step_us[-1] or (
            max_tokens > last and self.step_us[-2] == self.step_us[-1]
        ):
            raise UsageError(
                f"step_us of the step cost is flat at its end, {self.step_us[-2]:.6g} to "
                f"{self.step_us[-1]:.6g} us at {self.token_counts[-2]} to {last} tokens, and "
                f"says nothing up to {max_tokens}",
                hint="profile more and larger sizes (specctl profile)",
            )
        sizes = torch.arange(max_tokens + 1, dtype=torch.float64)
        stairs = times[torch.searchsorted(counts, sizes).clamp(max=len(counts) - 1)]
        slope = (times[-1] - times[-2]) / (counts[-1] - counts[-2])
        return stairs + slope * (sizes - counts[-1]).clamp(min=0)


# --------------------------------------------------------------------------- calibration


class Calibration(Record):
    """Conditional acceptance as a logistic function of the draft probability, per depth.

    P(accepted | parent accepted) = sigmoid(slope · logit(draft_prob) + intercept), multiplied
    along the path, so that no child is likelier than its parent. Temperatures per position are
    slopes with intercepts of 0.
    """

    learned: ClassVar = ("slopes", "intercepts")
    slopes: Annotated[Array, Field(min_length=1, max_length=MAX_DEPTH)]
    intercepts: Array
    """`slopes`, `intercepts` (nats): entry i is for depth i + 1, the last for all deeper levels."""

    @model_validator(mode="after")
    def _paired(self) -> Self:
        require(len(self.slopes) == len(self.intercepts), "one intercept per slope")
        return self


MAX_LOG_ODDS = 16.0
"""Nats; float32 probabilities above it round to 1."""


@dataclass(frozen=True)
class CalibrationTable:
    """A calibration on the device, `[D]` float64 each."""

    slopes: Tensor
    intercepts: Tensor
    max_depth: int | None = None  # of the trees; None reads it from the device

    def acceptance_logp(self, tree: TokenTree) -> Tensor:
        """`[B, N]` float64, nats: log-probability that the whole path to a node is accepted."""
        entry = (tree.depth - 1).clamp(0, len(self.slopes) - 1)
        odds = self.slopes[entry] * draft_log_odds(tree.draft_logp) + self.intercepts[entry]
        own = torch.nn.functional.logsigmoid(odds).masked_fill(tree.depth == 0, 0.0)
        deepest = int(tree.depth.max()) if self.max_depth is None else self.max_depth
        return path_sum(own, tree.parent, deepest)


def calibration_table(record: Calibration, device: Device) -> CalibrationTable:
    slopes, intercepts = (
        torch.tensor(values, dtype=torch.float64, device=device)
        for values in (record.slopes, record.intercepts)
    )
    return CalibrationTable(slopes, intercepts)


def draft_log_odds(draft_logp: Tensor) -> Tensor:
    """Log-odds of a log-probability, float64 nats, clipped to `MAX_LOG_ODDS` either way."""
    logp = draft_logp.double()
    rest = torch.log(-torch.expm1(logp))
    return (logp - rest).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)


# --------------------------------------------------------------------------- tokens against time


class CostedBudget(Budget):
    """A choice of the likeliest nodes of a batch, as many as their time is worth."""

    costs: StepCost | None = None  # time of a round by its size
    calibration: Calibration | None = None
    """From draft probability to acceptance; None uses draft probabilities uncalibrated."""

    @property
    def lacks_costs(self) -> bool:
        """Whether the rule needs a cost table and has none."""
        return self.costs is None


class SurvivalBudget(CostedBudget):
    """Global top slots by joint acceptance probability (vLLM PR 47808; DSpark, arXiv:2607.05147).

    Those rank the slots of chains and take the size of most expected tokens per profiled step cost;
    this budget does so for trees.
    """

    kind: Literal["survival"] = "survival"
    max_tokens: PositiveInt | None = None
    """Nodes verified per round over the batch, roots counted, so at least the batch size; None
    leaves the size to the costs."""

    @property
    def lacks_costs(self) -> bool:
        return self.max_tokens is None and self.costs is None


class MarginalBudget(CostedBudget):
    """Verify a node iff its joint acceptance is at least rate · marginal cost.

    With the long-run rate of the load as the price of time this maximises long-run tokens per
    time, where the rate of the single step (`SurvivalBudget`) speculates too much in hard
    contexts and too little in easy ones (Dinkelbach's method).
    """

    kind: Literal["marginal"] = "marginal"
    tokens_per_s: Annotated[float, Field(gt=0)]
    """Λ, the long-run rate of the whole batch at this load; at its fixed point the rule achieves
    this rate."""


@dataclass(frozen=True)
class CostedRule:
    """The likeliest nodes of a batch, of the size that pays best."""

    max_tokens: int | None
    step_us: Tensor | None
    """`[S + 1]` float64, us of a round by its size; None always verifies `max_tokens`."""
    tokens_per_us: float | None  # the price of time; None maximises the rate of the step
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

    The global maximum: with stairs in the costs, a search that stops at the first descent ends at
    the first stair (TensorRT-LLM PR 17056). Of equal rates the smaller size wins.

    Args:
        expected_tokens: `[M + 1]`. step_us: `[M + 1]` or more, both by m.
    """
    return (expected_tokens / step_us[: len(expected_tokens)]).argmax()


def best_surplus(expected_tokens: Tensor, step_us: Tensor, tokens_per_us: float) -> Tensor:
    """`[]` int64: the number of draft nodes m that maximises tokens less the price of time.

    The global maximum, as the marginal cost of a staircase is 0 on a stair and jumps at its end.
    Of equal surpluses the larger size wins: a node that just pays is verified.
    """
    surplus = expected_tokens - tokens_per_us * step_us[: len(expected_tokens)]
    return len(surplus) - 1 - surplus.flip(0).argmax()


def costed_rule(
    record: SurvivalBudget | MarginalBudget, batch_size: int, max_tokens: int, device: Device
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
    """Rejects a budget that needs a cost table and has none.

    A flat default would make every token free and verify all of them (SGLang PR 35413).
    """
    if isinstance(budget, CostedBudget) and budget.lacks_costs:
        raise UsageError(
            f"budget {budget.kind} decides by a table of step costs and has none",
            hint=(
                "measure one with `specctl profile` and give "
                f"it{', or fix max_tokens' if isinstance(budget, SurvivalBudget) else ''}"
            ),
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
