"""ECHO's sparse gates: a tree of fixed width that stops at a gate where its best path is unlikely.

level    1      2      3 (gate)             gate open: on with the default width
kept     W      W      W  or up to W_max    gate closed: this level is widened, none follows
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.base import floor_float32
from specctl.policy.rules import (
    BaseShape,
    Frontier,
    Level,
    Plan,
    RoundStart,
    gather_scores,
    stop_rows,
    top_order,
)
from specctl.policy.shapes import SparseGates


@dataclass
class GatedPlan(Plan):
    """Also remembers what each level keeps.

    Attributes:
        kept: per level `[B, W']` int64 pool indices, likeliest first, -1 padded.
        num_seen: nodes of the pool, root counted, whose levels are decided.
    """

    kept: list[Tensor] = field(default_factory=list)
    num_seen: int = 1


@dataclass(kw_only=True)
class SparseGatesShape(BaseShape):
    """Keeps and expands the `width` likeliest nodes a level; a gate may end and widen it.

    ECHO, arXiv:2604.09603, Eq. 5 to 7 and Algorithm 1 with the settled repairs: d = 0 is the
    first drafted level, there is a depth cap, and where the size is capped the levels are filled
    from the root on, the widened one last, as Algorithm 1 does for a batch of one.

    Attributes:
        max_width: nodes that a level keeps where its gate closed.
        gates: log-probability of a level's likeliest node below which its gate closes, by level.
    """

    max_width: int
    gates: dict[int, float]

    def begin(self, start: RoundStart) -> Plan:
        plan = super().begin(start)
        never = torch.zeros_like(plan.max_depth)
        return GatedPlan(plan.num_rows, plan.max_depth, stopped_at=never)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        best, exists = self._decide(cast(GatedPlan, plan), level)
        going_on = (plan.max_depth > level.depth)[:, None]
        return Frontier(best[:, : self.width], going_on & exists[:, : self.width])

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        plan = cast(GatedPlan, plan)
        if plan.num_seen < pool.joint_logp.shape[1]:  # `grow` is not asked after the last level
            self._decide(plan, Level(len(plan.kept) + 1, pool, plan.num_seen))
        kept = torch.cat(plan.kept, 1)
        exists = kept >= 0
        exists = exists & (exists.cumsum(1) < self.max_tokens)
        root = torch.zeros_like(kept[:, :1])
        beyond = pool.joint_logp.shape[1]
        ordered = torch.cat([root, kept.masked_fill(~exists, beyond)], 1).sort(1).values
        ordered = ordered[:, : self.max_tokens]
        return ordered.masked_fill(ordered == beyond, -1)

    def _decide(self, plan: GatedPlan, level: Level) -> tuple[Tensor, Tensor]:
        """Tests the gate of a level and notes what the level keeps.

        Returns:
            `[B, W']` the level's likeliest nodes, pool indices, and whether they exist.
        """
        closed = self._closed(plan, level)
        order = top_order(level.joint_logp, self.max_width)
        exists = gather_scores(level.joint_logp, order) > -math.inf
        places = torch.arange(order.shape[1], device=order.device)
        room = torch.where(closed, self.max_width, self.width)[:, None]
        best = order + level.start
        plan.kept.append(best.masked_fill(~exists | (places >= room), -1))
        plan.num_seen = level.pool.joint_logp.shape[1]
        return best, exists

    def _closed(self, plan: GatedPlan, level: Level) -> Tensor:
        """`[B]` bool: the gate of this level closes in rows that have come so far."""
        assert plan.stopped_at is not None
        confidence = level.joint_logp.amax(1)
        closed = gate_closes(confidence, self.gates.get(level.depth, -math.inf))
        closed = closed & (confidence > -math.inf)  # a row that has no candidate stopped before
        plan.stopped_at = torch.where(closed, level.depth, plan.stopped_at)
        stop_rows(plan, level, closed)
        return closed


def sparse_gates_shape(record: SparseGates, device: torch.device) -> SparseGatesShape:
    """The rule of the gates."""
    return SparseGatesShape(
        max_depth=record.reached_depth,
        top_k=record.max_width,
        width=record.width,
        max_tokens=min(record.num_tokens, record.most_tokens),
        device=device,
        max_width=record.max_width,
        gates={
            level: log_threshold(prob)
            for level, prob in zip(record.gate_levels, record.thresholds, strict=True)
        },
    )


def gate_closes(confidence: Tensor, log_bar: float) -> Tensor:
    """Bool: the log-probability of a level's likeliest path is below the bar."""
    return confidence < log_bar


def stop_levels(record: SparseGates, gate_logp: Tensor) -> Tensor:
    """`[n]` int64 level of the first gate that closes, 0 for none.

    Args:
        gate_logp: `[n, G]` float32, nats, of the likeliest path to each gate's level.
    """
    stopped = torch.zeros(len(gate_logp), dtype=torch.int64, device=gate_logp.device)
    for column, level in reversed(list(enumerate(record.gate_levels))):
        closed = gate_closes(gate_logp[:, column], log_threshold(record.thresholds[column]))
        stopped = torch.where(closed, level, stopped)
    return stopped


def log_threshold(prob: float) -> float:
    """Nats, rounded down, so that a probability on the threshold passes after its own rounding."""
    return floor_float32(math.log(prob)) if prob > 0 else -math.inf
