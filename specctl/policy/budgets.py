"""Common parts of budgets: step costs, calibration, and the nodes of a batch in one order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.features import DraftPool
from specctl.lazy import Tensor, torch
from specctl.policy.family import MAX_DEPTH, Budget, Family
from specctl.policy.rules import Plan, top_order
from specctl.records import Array, PositiveInt, Record, increasing, require
from specctl.tree import TokenTree, path_sum, take


class PerRequest(Budget):
    """Each request submits what its shape chose."""

    kind: Literal["per_request"] = "per_request"


class PerRequestRule:
    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        del plan, pool
        return submitted


def per_request_rule(
    record: PerRequest, batch_size: int, max_tokens: int, device: torch.device
) -> PerRequestRule:
    del record, batch_size, max_tokens, device
    return PerRequestRule()


PER_REQUEST = Family(record=PerRequest, rule=per_request_rule)


def check_roots(kind: str, most: int | None, batch_size: int) -> None:
    """Refuses a budget that cannot verify every root."""
    if most is not None and most < batch_size:
        raise UsageError(
            f"max_tokens of budget {kind}",
            expected=f"at least the batch size, {batch_size}: every root is verified",
            found=str(most),
            fix="raise it, or decode fewer requests together",
        )


# --------------------------------------------------------------------------- the batch in order


@dataclass(frozen=True)
class Ranking:
    """The M draft nodes that a batch could verify, likeliest first.

    Every prefix is closed in each request and is the best choice of its size
    (notes/state-of-the-art.md, 2.1).

    Attributes:
        order: `[M]` int64, places in the slot-major `[N, B]` table of submitted nodes.
        expected_tokens: `[M + 1]` float64, tokens that verifying the first m is expected to
            emit over the batch, the token that every request gets anyway included.
    """

    order: Tensor
    expected_tokens: Tensor


def keep_first(submitted: Tensor, order: Tensor, num_nodes: Tensor | int) -> Tensor:
    """The roots and the first `num_nodes` places of an order, in the layout of `submitted`.

    Args:
        submitted: `[B, N]`, as in `BudgetRule.share`.
        order: `[M]` int64, places in the slot-major `[N, B]` table of it; empty ones keep nothing.
    """
    num_rows, num_slots = submitted.shape
    first = torch.arange(len(order), device=submitted.device) < num_nodes
    chosen = torch.zeros(num_slots * num_rows, dtype=torch.bool, device=submitted.device)
    chosen = chosen.scatter(0, order, first).view(num_slots, num_rows).T
    is_root = torch.arange(num_slots, device=submitted.device) == 0
    beyond = torch.iinfo(submitted.dtype).max
    kept = (chosen | is_root) & (submitted >= 0)
    ordered = submitted.masked_fill(~kept, beyond).sort(1).values
    return ordered.masked_fill(ordered == beyond, -1)


def rank_batch(pool: DraftPool, submitted: Tensor, calibration: CalibrationTable | None) -> Ranking:
    """Ranks the submitted draft nodes of a batch by the probability that their path is accepted.

    Slot by slot, so that of equal nodes the one nearer its root comes first, then the one of
    the earlier request: the order depends on nothing but the scores and the rows.

    Args:
        submitted: `[B, N]`, as in `BudgetRule.share`.
        calibration: of the draft probabilities; None takes them as they are.
    """
    num_rows, num_slots = submitted.shape
    logp = acceptance_logp(pool, submitted, calibration)
    logp[:, 0] = float("-inf")  # a root is verified in any case
    table = logp.T.reshape(1, -1)
    order = top_order(table, (num_slots - 1) * num_rows)[0]
    prob = table[0][order].double().exp()
    certain = prob.new_full((1,), num_rows)
    return Ranking(order, torch.cat([certain, prob]).cumsum(0))


def acceptance_logp(
    pool: DraftPool, submitted: Tensor, calibration: CalibrationTable | None
) -> Tensor:
    """`[B, N]` float32, nats: log-probability that a submitted node's path is accepted.

    -inf where a slot holds no node.
    """
    if calibration is None:
        logp = pool.joint_logp.gather(1, submitted.clamp(min=0))
    else:
        logp = calibration.acceptance_logp(take(pool.tree, submitted)).float()
    return logp.masked_fill(submitted < 0, float("-inf"))


# --------------------------------------------------------------------------- step costs


Microseconds = Annotated[float, Field(gt=0)]


class StepCost(Record):
    """Time of one verification round by its size, at one batch size and context.

    Attributes:
        token_counts: strictly increasing, nodes the target verifies over the batch, roots
            counted; two or more.
        step_us: us, as many, never falling: time of a whole round of that size.
    """

    token_counts: Annotated[tuple[PositiveInt, ...], Field(min_length=2)]
    step_us: tuple[Microseconds, ...]

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

        A staircase up to the last count, where a batch is padded to the next captured size (a
        size between two counts costs what the larger one does, and size 0 what the smallest
        does); beyond it the line through the last two.

        Raises:
            UsageError: a flat table, or a flat end beyond which sizes are needed: every
                token would seem free.
        """
        counts = torch.tensor(self.token_counts, dtype=torch.float64)
        times = torch.tensor(self.step_us, dtype=torch.float64)
        last = self.token_counts[-1]
        if self.step_us[0] == self.step_us[-1] or (
            max_tokens > last and self.step_us[-2] == self.step_us[-1]
        ):
            raise UsageError(
                "step_us of the step cost",
                expected=f"a cost that rises with the tokens, up to {max_tokens} of them",
                found=f"a flat one, {self.step_us[-2]:.6g} to {self.step_us[-1]:.6g} us "
                f"at {self.token_counts[-2]} to {last} tokens",
                fix="profile more and larger sizes (specctl profile)",
            )
        sizes = torch.arange(max_tokens + 1, dtype=torch.float64)
        stairs = times[torch.searchsorted(counts, sizes).clamp(max=len(counts) - 1)]
        slope = (times[-1] - times[-2]) / (counts[-1] - counts[-2])
        return stairs + slope * (sizes - counts[-1]).clamp(min=0)


# --------------------------------------------------------------------------- calibration


class Calibration(Record):
    """Conditional acceptance as a logistic function of the draft probability, per depth.

    P(accepted | parent accepted) = sigmoid(slope · logit(draft_prob) + intercept), multiplied
    along the path, so that no child is likelier than its parent whatever was fitted
    (notes/state-of-the-art.md, 2.1 and 4c; temperatures per position are the slopes alone).

    Attributes:
        slopes, intercepts: entry i is for depth i + 1, the last one for all deeper levels;
            slopes have no unit, intercepts are log-odds in nats.
    """

    learned: ClassVar = ("slopes", "intercepts")
    slopes: Annotated[Array, Field(min_length=1, max_length=MAX_DEPTH)]
    intercepts: Array

    @model_validator(mode="after")
    def _paired(self) -> Self:
        require(len(self.slopes) == len(self.intercepts), "one intercept per slope")
        return self


MAX_LOG_ODDS = 16.0
"""Nats. Float32 cannot tell a probability from 1 beyond it."""


@dataclass(frozen=True)
class CalibrationTable:
    """A calibration on the device, `[D]` float64 each.

    Attributes:
        max_depth: of the trees; None reads it from the device.
    """

    slopes: Tensor
    intercepts: Tensor
    max_depth: int | None = None

    def acceptance_logp(self, tree: TokenTree) -> Tensor:
        """`[B, N]` float64, nats: log-probability that the whole path to a node is accepted."""
        entry = (tree.depth - 1).clamp(0, len(self.slopes) - 1)
        odds = self.slopes[entry] * draft_log_odds(tree.draft_logp) + self.intercepts[entry]
        own = torch.nn.functional.logsigmoid(odds).masked_fill(tree.depth == 0, 0.0)
        deepest = int(tree.depth.max()) if self.max_depth is None else self.max_depth
        return path_sum(own, tree.parent, deepest)


def calibration_table(record: Calibration, device: torch.device) -> CalibrationTable:
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
