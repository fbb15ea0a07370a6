"""What all budgets share: the nodes of a whole batch in one order, and cutting it off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.calibration import CalibrationTable
from specctl.policy.rules import Plan, gather_scores, top_order
from specctl.tree import take


class PerRequestRule:
    """Each request verifies what its shape selected."""

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        del plan, pool
        return submitted


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

    def keep(self, submitted: Tensor, num_nodes: Tensor | int) -> Tensor:
        """The roots and the first `num_nodes` draft nodes, in the layout of `submitted`."""
        return keep_first(submitted, self.order, num_nodes)


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
        logp = gather_scores(pool.joint_logp, submitted.clamp(min=0))
    else:
        logp = calibration.acceptance_logp(take(pool.tree, submitted)).float()
    return logp.masked_fill(submitted < 0, float("-inf"))
