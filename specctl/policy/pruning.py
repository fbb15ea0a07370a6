"""Trees pruned by a score while they grow: what no score reaches is neither expanded nor verified.

Which score is the family's own: the joint probability (`threshold`), or what a classifier says
of a node (`c2t`). Growing, closing and capping are the same for all of them, and stand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from specctl.features import DraftPool
from specctl.lazy import Tensor, torch
from specctl.policy.rules import (
    SORTED_WHOLE,
    BaseShape,
    Frontier,
    Level,
    Plan,
    RoundStart,
    best_nodes,
    top_order,
)

Score = Callable[[DraftPool, int], Tensor]
"""`(pool, start) -> [B, P - start]` float32, more is better, -inf in empty slots: scores of the
pool's nodes from index `start` on, which are one level or more."""
Combine = Callable[[Tensor, Tensor], Tensor]
"""`(of the parent, own) -> combined`, shapes `[B, W, 1]` and `[B, W, K]`: a node's score behind
its parent's. A result that is never above the parent's keeps a capped tree closed."""


@dataclass
class PrunedPlan(Plan):
    """Also remembers the scores of what was drafted so far.

    Attributes:
        levels: `[B, C]` float32 of each level, combined along the path; -inf in empty slots, and
            inf at the root, which is always submitted.
        of_frontier: `[B, W]` float32, scores of the nodes whose children come next.
        scores: `[B, P']` of all that was scored; empty before `select`.
    """

    levels: list[Tensor] = field(default_factory=list)
    of_frontier: Tensor = field(default_factory=lambda: torch.empty(0))
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    num_scored: int = 1


@dataclass(kw_only=True)
class PrunedShape(BaseShape):
    """Expands the best `width` nodes of a level among those that reach `min_score`.

    A round scores once a level, so on a CPU it costs its number of operations: scores are
    kept by level, and a child's parent is known by its place, W-major below the last frontier.

    Attributes:
        score: of nodes as they are drafted. combine: with the parent's; None leaves a node its
            own, for scores that cannot rise along a path or need no closing.
        min_score: below it a node is neither expanded nor submitted.
        root_score: what `combine` gets for the parent of the first level.
    """

    score: Score
    min_score: float
    combine: Combine | None = None
    root_score: float = float("inf")

    def begin(self, start: RoundStart) -> Plan:
        plan = super().begin(start)
        always, root = (
            torch.full((plan.num_rows, 1), score, device=self.device)
            for score in (math.inf, self.root_score)
        )
        return PrunedPlan(plan.num_rows, plan.max_depth, levels=[always], of_frontier=root)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        plan = cast(PrunedPlan, plan)
        self._score_new(plan, level.pool)
        plan.of_frontier, beam = best_scores(plan.levels[-1], self.width)
        return Frontier(beam + level.start, plan.of_frontier >= self.min_score)

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        plan = cast(PrunedPlan, plan)
        self._score_new(plan, pool)
        plan.scores = scores = torch.cat(plan.levels, 1)
        if scores.shape[1] > self.max_tokens:
            kept = scores.masked_fill(scores < self.min_score, -math.inf)
            return best_nodes(replace(pool, joint_logp=kept), self.max_tokens)
        return indices_of(scores >= self.min_score)

    def level_scores(self, of_parent: Tensor, pool: DraftPool, start: int) -> Tensor:
        """`[B, C]` combined scores of the level that starts there; -inf in empty slots.

        Args:
            of_parent: `[B, W]`, of the frontier that the level's nodes are children of.
        """
        own = self.score(pool, start)
        if self.combine is None:
            return own
        return self.combine(of_parent[..., None], own.view(*of_parent.shape, -1)).flatten(1)

    def _score_new(self, plan: PrunedPlan, pool: DraftPool) -> None:
        """Scores the level that was drafted since the last call, if there is one."""
        start, size = plan.num_scored, pool.joint_logp.shape[1]
        if start < size:
            plan.levels.append(self.level_scores(plan.of_frontier, pool, start))
            plan.num_scored = size


def best_scores(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best of each row, best first, and where they stand; as `top_order`."""
    if scores.numel() < SORTED_WHOLE:
        values, order = scores.sort(dim=1, descending=True, stable=True)
        return values[:, :width], order[:, :width]
    order = top_order(scores, width)
    return scores.gather(1, order), order


def indices_of(kept: Tensor) -> Tensor:
    """`[B, P]` int64: where `kept` `[B, P]` is true, ascending, -1 padded."""
    kept, order = kept.sort(dim=1, descending=True, stable=True)
    return order.masked_fill_(~kept, -1)
