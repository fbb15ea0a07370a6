"""OPT-Tree: the tree of highest expected acceptance, grown until a level adds too little."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.policy.records import OptTree
from specctl.policy.rules import (
    BaseShape,
    Frontier,
    Level,
    Plan,
    best_of_level,
    rows_below,
    stop_rows,
)


@dataclass(kw_only=True)
class OptTreeShape(BaseShape):
    """Stops where one more level raised the expectation by no more than `min_gain` tokens."""

    min_gain: float

    def grow(self, plan: Plan, level: Level) -> Frontier:
        joint_logp, budget = level.pool.joint_logp, self.max_tokens - 1
        gain = expected_accepted(joint_logp, budget)
        gain = gain - expected_accepted(joint_logp[:, : level.start], budget)
        stop_rows(plan, level, gain <= self.min_gain)
        return rows_below(plan, level, best_of_level(level, self.width))


def expected_accepted(joint_logp: Tensor, num_nodes: int) -> Tensor:
    """Draft tokens that the best tree of a pool is expected to get accepted, E(A) - 1.

    Each node adds the probability that its whole path is accepted (OPT-Tree, section 3.2).

    Args:
        joint_logp: `[B, P]`, nats, root first.
        num_nodes: draft nodes of the tree.

    Returns:
        `[B]` float64.
    """
    drafted = joint_logp[:, 1:]
    best = drafted.topk(min(num_nodes, drafted.shape[1]), dim=1).values
    return best.double().exp().sum(1)


def opt_tree_shape(record: OptTree, device: torch.device) -> OptTreeShape:
    """The rule of OPT-Tree."""
    return OptTreeShape(
        max_depth=record.depth,
        top_k=record.top_k,
        width=record.top_k,
        max_tokens=record.num_tokens,
        device=device,
        min_gain=record.min_gain,
    )
