"""HeteroSpec: the bin of Φ after the base draft chooses how deep and how wide to go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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

BinOf = Callable[[Tensor], Tensor]
"""`[B]` float32 Φ, nats, to `[B]` int64 bins."""


@dataclass(kw_only=True)
class EntropyBinsShape(BaseShape):
    """Drafts the base depth, reads Φ, then extends and prunes by bin (sections 4.1 to 4.3).

    Attributes:
        conditional: see `meta_path`.
        edges: `[E]` float32, nats, ascending.
        bin_of: what decides by them.
        bin_depths, bin_tokens: `[E + 1]` int64, levels and size of every bin, root counted.
    """

    base_depth: int
    conditional: bool
    edges: Tensor
    bin_of: BinOf
    bin_depths: Tensor
    bin_tokens: Tensor

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
        plan.bins = self.bin_of(phi(pool, conditional=self.conditional))
        plan.max_depth = self.bin_depths[plan.bins]


def entropy_bin(value: Tensor, edges: Tensor) -> Tensor:
    """`[B]` int64 bin of each value: the number of edges strictly below it (`<=` goes left).

    NaN stands above all edges, in the last bin.
    """
    return torch.bucketize(value, edges, right=False)


def entropy_bins_shape(record: EntropyBins, device: torch.device) -> EntropyBinsShape:
    """The rule of a fitted record, its tables on the device."""
    depths, tokens = record.plan_depths, record.plan_tokens
    edges = torch.tensor(record.edges, dtype=torch.float32, device=device)
    return EntropyBinsShape(
        max_depth=max(depths),
        top_k=record.base.top_k,
        width=record.base.top_k,
        max_tokens=max(tokens),
        device=device,
        base_depth=record.base.depth,
        conditional=record.path == "conditional",
        edges=edges,
        bin_of=partial(entropy_bin, edges=edges),
        bin_depths=torch.tensor(depths, device=device),
        bin_tokens=torch.tensor(tokens, device=device),
    )
