"""ECHO's elastic budget: a batch deepens level by level, and what is left widens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.rules import Plan, rank_order
from specctl.policy.sharing import acceptance_logp, keep_first
from specctl.tree import take


@dataclass(frozen=True)
class ElasticRule:
    """Algorithm 1 of ECHO (arXiv:2604.09603) with the settled repairs, as one order of nodes.

    In stage d every request that still deepens gets its `default_width` likeliest nodes of level
    d; a gate ends that for its request from its own level on. The stages behind them widen: a
    request gets the likeliest `max_width` of its remaining nodes, then as many again while some
    are left. Within a stage requests stand in order of their confidence, the probability of
    their likeliest node there; ties go to the earlier row. The batch verifies its roots and the
    first `max_tokens - B` nodes of that order. So nothing is widened before all have deepened,
    no budget is overdrawn, and more budget never takes a node away.

    Attributes:
        max_tokens: K_max, roots counted. default_width: W_dflt. max_width: W_max.
        by_row: requests stand in the order of rows instead, as the paper's loop has it.
        max_depth: of the trees; None asks the device for it.
    """

    max_tokens: int
    default_width: int
    max_width: int
    by_row: bool
    max_depth: int | None = None

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        nodes, slot = rank_rows(pool, submitted)
        deepens = nodes.deepening(plan.stopped_at, self.default_width, self.max_depth)
        stage = nodes.stages(deepens, self.max_width)
        num_rows = len(slot)
        place = slot * num_rows + torch.arange(num_rows, device=slot.device)[:, None]
        order = place.flatten()[nodes.order(stage, by_row=self.by_row)]
        return keep_first(submitted, order[num_rows:], self.max_tokens - num_rows)


@dataclass(frozen=True)
class RankedNodes:
    """The submitted nodes of a batch, each row likeliest first, hence its root first, `[B, N]`.

    Attributes:
        score: float32, nats, -inf in empty slots. depth, parent: int64; parents as places.
    """

    score: Tensor
    depth: Tensor
    parent: Tensor

    @property
    def exists(self) -> Tensor:
        """`[B, N]` bool."""
        return self.score > -math.inf

    def deepening(
        self, stopped_at: Tensor | None, width: int, max_depth: int | None = None
    ) -> Tensor:
        """`[B, N]` bool: the `width` likeliest nodes of every level above the row's closed gate.

        Of a level only nodes with a deepening parent count, so that all levels are closed.
        """
        above = self.exists
        if stopped_at is not None:
            above = above & ((self.depth < stopped_at[:, None]) | (stopped_at == 0)[:, None])
        deepens = above & (self.depth == 0)
        deepest = int(self.depth.max()) if max_depth is None else max_depth
        for depth in range(1, deepest + 1):
            level = above & (self.depth == depth) & deepens.gather(1, self.parent)
            deepens = deepens | (level & (level.cumsum(1) <= width))
        return deepens

    def stages(self, deepens: Tensor, max_width: int) -> Tensor:
        """`[B, N]` int64: roots 0, deepening nodes by level, then widening ones, then nothing."""
        rest = self.exists & ~deepens
        turn = (rest.cumsum(1) - 1).clamp(min=0) // max_width
        num_slots = rest.shape[1]  # no level is as deep
        stage = torch.where(deepens, self.depth, num_slots + turn)
        return stage.masked_fill(~self.exists, 2 * num_slots)

    def order(self, stage: Tensor, *, by_row: bool) -> Tensor:
        """`[B · N]` flat places by stage, then confidence of the row in it, then row, then rank."""
        flat = stage.flatten()
        if by_row:
            return flat.sort(stable=True).indices
        best = self.score.new_full((len(stage), 2 * stage.shape[1] + 1), -math.inf)
        best = best.scatter_reduce(1, stage, self.score, "amax")
        confidence = best.gather(1, stage).flatten()
        order = confidence.sort(descending=True, stable=True).indices
        return order[flat[order].sort(stable=True).indices]


def rank_rows(pool: DraftPool, submitted: Tensor) -> tuple[RankedNodes, Tensor]:
    """The submitted nodes by falling probability of their path, and the slot of each, `[B, N]`."""
    tree, score = take(pool.tree, submitted), acceptance_logp(pool, submitted, None)
    slot = rank_order(score)
    place = slot.argsort(1)
    parent = place.gather(1, tree.parent.gather(1, slot).clamp(min=0))
    return RankedNodes(score.gather(1, slot), tree.depth.gather(1, slot), parent), slot
