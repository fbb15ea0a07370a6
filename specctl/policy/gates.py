"""ECHO's sparse gates: a tree of fixed width that stops at a gate where its best path is unlikely.

level    1      2      3 (gate)             gate open: on with the default width
kept     W      W      W  or up to W_max    gate closed: this level is widened, none follows
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    best_of_level,
    gather_scores,
    rows_below,
    stop_rows,
)
from specctl.policy.shapes import SparseGates

Closes = Callable[[Tensor, int], Tensor]
"""`(confidence, level) -> closed`: `[B]` float32, nats, of the likeliest path to a level that has a
gate, to `[B]` bool."""


@dataclass
class GatedPlan(Plan):
    """Also remembers what each level keeps.

    Attributes:
        kept: per level `[B, W']` int64 pool indices, likeliest first, -1 for none; a row that
            has stopped finds empty slots there.
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
        closes: what decides by them.
    """

    max_width: int
    gates: dict[int, float]
    closes: Closes

    def begin(self, start: RoundStart) -> Plan:
        plan = super().begin(start)
        never = torch.zeros_like(plan.max_depth)
        return GatedPlan(plan.num_rows, plan.max_depth, stopped_at=never)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        best = self._decide(cast(GatedPlan, plan), level)
        return rows_below(plan, level, best[:, : self.width])

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        plan = cast(GatedPlan, plan)
        if plan.num_seen < pool.joint_logp.shape[1]:  # `grow` is not asked after the last level
            self._decide(plan, Level(len(plan.kept) + 1, pool, plan.num_seen))
        kept = torch.cat(plan.kept, 1)
        exists = gather_scores(pool.joint_logp, kept.clamp(min=0)) > -math.inf
        exists = exists & (kept >= 0)
        exists = exists & (exists.cumsum(1) < self.max_tokens)
        beyond = pool.joint_logp.shape[1]
        root = torch.zeros_like(kept[:, :1])
        ordered = torch.cat([root, kept.masked_fill(~exists, beyond)], 1).sort(1).values
        ordered = ordered[:, : self.max_tokens]
        return ordered.masked_fill(ordered == beyond, -1)

    def _decide(self, plan: GatedPlan, level: Level) -> Tensor:
        """`[B, W']` the level's likeliest nodes, after its gate; notes which of them it keeps."""
        plan.num_seen = level.pool.joint_logp.shape[1]
        if level.depth not in self.gates:
            best = best_of_level(level, self.width)
            plan.kept.append(best)
            return best
        closed = self._close(plan, level)[:, None]
        best = best_of_level(level, self.max_width)
        spare = torch.arange(best.shape[1], device=best.device) >= self.width
        plan.kept.append(best.masked_fill(spare & ~closed, -1))
        return best

    def _close(self, plan: GatedPlan, level: Level) -> Tensor:
        """`[B]` bool: the gate closes in a row that has come so far; notes it in the plan."""
        assert plan.stopped_at is not None
        confidence = level.joint_logp.amax(1)
        closed = self.closes(confidence, level.depth) & (confidence > -math.inf)
        plan.stopped_at = torch.where(closed, level.depth, plan.stopped_at)
        stop_rows(plan, level, closed)
        return closed


def sparse_gates_shape(record: SparseGates, device: torch.device) -> SparseGatesShape:
    """The rule of the gates."""
    gates = {
        level: log_threshold(prob)
        for level, prob in zip(record.gate_levels, record.thresholds, strict=True)
    }
    return SparseGatesShape(
        max_depth=record.reached_depth,
        top_k=record.max_width,
        width=record.width,
        max_tokens=min(record.num_tokens, record.most_tokens),
        device=device,
        max_width=record.max_width,
        gates=gates,
        closes=lambda confidence, level: gate_closes(confidence, gates[level]),
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
