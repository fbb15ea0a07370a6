"""Trees pruned by a score while they grow: what no score reaches is neither expanded nor verified.

Which score is the family's own: the joint probability (`threshold`), or what a classifier says
of a node (`c2t`). Growing, closing and capping are the same for all of them, and stand here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.rules import BaseShape, Frontier, Level, Plan, RoundStart, best_nodes, top_order

Score = Callable[[DraftPool, int], Tensor]
"""`(pool, start) -> [B, P - start]` float32, more is better: scores of the pool's nodes from index
`start` on, which are one level or more. What it says of empty slots is not looked at."""
Combine = Callable[[Tensor, Tensor], Tensor]
"""`(of the parent, own) -> [B, C]`: a node's score behind its parent's. A result that is never
above the parent's keeps a capped tree closed."""


def own_score(of_parent: Tensor, own: Tensor) -> Tensor:
    """The node's own, for scores that cannot rise along a path."""
    del of_parent
    return own


def running_min(of_parent: Tensor, own: Tensor) -> Tensor:
    """No better than any ancestor."""
    return torch.minimum(of_parent, own)


@dataclass
class PrunedPlan(Plan):
    """Also remembers the scores of what was drafted so far.

    Attributes:
        scores: `[B, P']` float32, combined along the path; the root's is `root_score`, that of
            an empty slot -inf.
    """

    scores: Tensor | None = None


@dataclass(kw_only=True)
class PrunedShape(BaseShape):
    """Expands the best `width` nodes of a level among those that reach `min_score`.

    Attributes:
        score: of nodes as they are drafted. combine: with the parent's.
        min_score: below it a node is neither expanded nor submitted.
        root_score: what `combine` gets for the parent of the first level.
    """

    score: Score
    min_score: float
    combine: Combine = own_score
    root_score: float = float("inf")

    def begin(self, start: RoundStart) -> Plan:
        plan = super().begin(start)
        scores = torch.full((plan.num_rows, 1), self.root_score, device=self.device)
        return PrunedPlan(plan.num_rows, plan.max_depth, scores=scores)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        scores = self._scores(plan, level.pool)[:, level.start :]
        beam = top_order(scores, self.width)
        going_on = (plan.max_depth > level.depth)[:, None]
        return Frontier(beam + level.start, going_on & (scores.gather(1, beam) >= self.min_score))

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        scores = self._scores(plan, pool)
        kept = scores.masked_fill(scores < self.min_score, float("-inf"))
        kept[:, 0] = float("inf")
        return best_nodes(replace(pool, joint_logp=kept), self.max_tokens)

    def level_scores(self, of_parent: Tensor, pool: DraftPool, start: int) -> Tensor:
        """`[B, P - start]` combined scores of the level that starts there; -inf in empty slots.

        Args:
            of_parent: `[B, P - start]`, the score of each node's parent.
        """
        scores = self.combine(of_parent, self.score(pool, start))
        empty = pool.joint_logp[:, start:] == float("-inf")
        return scores.masked_fill(empty, float("-inf"))

    def _scores(self, plan: Plan, pool: DraftPool) -> Tensor:
        """`[B, P]` scores of the whole pool; only what is new since the last call is computed."""
        plan = cast(PrunedPlan, plan)
        assert plan.scores is not None
        start, size = plan.scores.shape[1], pool.joint_logp.shape[1]
        if start < size:
            of_parent = plan.scores.gather(1, pool.tree.parent[:, start:].clamp(min=0))
            new = self.level_scores(of_parent, pool, start)
            plan.scores = torch.cat([plan.scores, new], 1)
        return plan.scores
