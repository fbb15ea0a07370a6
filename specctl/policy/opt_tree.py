"""OPT-Tree: the tree of highest expected acceptance, grown until a level adds too little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specctl.lazy import Tensor, torch
from specctl.policy.family import Depth, Family, NumTokens, Shape, TopK, grid
from specctl.policy.rules import (
    BaseShape,
    Frontier,
    Level,
    Plan,
    best_of_level,
    rows_below,
    stop_rows,
)


class OptTree(Shape):
    """OPT-Tree: the tree of highest expected acceptance under a node budget (arXiv:2406.17276).

    After every level the best tree of what is drafted is known, the `num_tokens` nodes of
    highest path probability, and so is its expected acceptance length, their sum. Drafting goes
    on while the last level raised it by more than `min_gain`.

    Attributes:
        depth: drafted levels at most (the released code: 10).
        top_k: children per expanded node and nodes expanded per level. The paper's is
            `num_tokens - 1`, which leaves out nothing; a log holds less.
        num_tokens: nodes submitted, root counted.
        min_gain: δ, tokens; the paper suggests about the cost of a draft step over that of a
            target step, between 0 and 1.
    """

    always_reads: ClassVar = ("joint_prob",)
    kind: Literal["opt_tree"] = "opt_tree"
    depth: Depth = 10
    top_k: TopK = 10
    num_tokens: NumTokens = 51
    min_gain: Annotated[float, Field(ge=0)] = 0.5


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
    """`[B]` float64: draft tokens that the best tree of `num_nodes` draft nodes of a pool is
    expected to get accepted, E(A) - 1 (section 3.2). `joint_logp` is `[B, P]`, root first."""
    drafted = joint_logp[:, 1:]
    best = drafted.topk(min(num_nodes, drafted.shape[1]), dim=1).values
    return best.double().exp().sum(1)


def opt_tree_shape(record: OptTree, device: torch.device) -> OptTreeShape:
    size = (record.depth, record.top_k, record.top_k, record.num_tokens)
    return OptTreeShape(*size, device, min_gain=record.min_gain)


OPT_TREE = Family(
    record=OptTree,
    rule=opt_tree_shape,
    words={"opt_tree": {}},
    grids={
        "opt_tree": grid(
            depth="4 6 8 10",
            top_k="4 8 10",
            num_tokens="6 12 24 51",
            min_gain="0.05 0.1 0.2 0.3 0.5 0.8",
        )
    },
)
