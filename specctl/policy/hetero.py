"""HeteroSpec: the bin of Φ after the base draft chooses how deep and how wide to go on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specctl.features import DraftPool, phi
from specctl.policy.records import EntropyBins
from specctl.policy.rules import (
    BaseShape,
    Frontier,
    Level,
    Plan,
    RoundStart,
    best_nodes,
    best_of_level,
    rows_below,
)


@dataclass
class EntropyBinsShape(BaseShape):
    """Drafts the base depth, reads Φ, then extends and prunes by bin (sections 4.1 to 4.3)."""

    base_depth: int = 0
    conditional: bool = False
    edges: Tensor = field(default_factory=lambda: torch.empty(0))
    bin_depths: Tensor = field(default_factory=lambda: torch.empty(0))
    bin_tokens: Tensor = field(default_factory=lambda: torch.empty(0))

    def begin(self, start: RoundStart) -> Plan:
        plan = super().begin(start)
        plan.max_depth = torch.full_like(plan.max_depth, self.base_depth)
        return plan

    def grow(self, plan: Plan, level: Level) -> Frontier:
        if level.depth == self.base_depth:
            self._choose_bins(plan, level.pool)
        return rows_below(plan, level, best_of_level(level, self.width))

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        if plan.bins is None:  # no bin extends the draft, so `grow` was never asked at the end
            self._choose_bins(plan, pool)
        assert plan.bins is not None
        return best_nodes(pool, self.max_tokens, limit=self.bin_tokens[plan.bins])

    def _choose_bins(self, plan: Plan, pool: DraftPool) -> None:
        plan.bins = entropy_bin(phi(pool, conditional=self.conditional), self.edges)
        plan.max_depth = self.bin_depths[plan.bins]


def entropy_bin(value: Tensor, edges: Tensor) -> Tensor:
    """`[B]` int64 bin of each value: the number of edges strictly below it (`<=` goes left)."""
    return torch.bucketize(value, edges, right=False)


def entropy_bins_shape(record: EntropyBins, device: torch.device) -> EntropyBinsShape:
    """The rule of a fitted record, its tables on the device."""
    depths, tokens = record.plan_depths, record.plan_tokens
    return EntropyBinsShape(
        max_depth=max(depths),
        top_k=record.base.top_k,
        width=record.base.top_k,
        max_tokens=max(tokens),
        device=device,
        base_depth=record.base.depth,
        conditional=record.path == "conditional",
        edges=torch.tensor(record.edges, dtype=torch.float32, device=device),
        bin_depths=torch.tensor(depths, device=device),
        bin_tokens=torch.tensor(tokens, device=device),
    )
