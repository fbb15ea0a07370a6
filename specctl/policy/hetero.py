"""HeteroSpec: the bin of Φ after the base draft chooses depth and size of the tree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.features import phi
from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import MAX_DEPTH, MAX_TOKENS, Shape, ShapeFamily, grid, never, prunes
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
from specctl.policy.static import StaticTree
from specctl.records import Array, increasing, require
from specctl.tree import DraftPool

MAX_EDGES = 255


class EntropyBins(Shape):
    """HeteroSpec (arXiv:2505.13254): bins of Φ choose depth and size of an EAGLE-2 tree.

    With Δ = alpha - r in the r-th low-entropy bin (0 elsewhere), depth becomes depth + Δ and
    size becomes ceil(gamma_r · num_tokens + Δ), never below depth + 1 nodes.
    """

    learned: ClassVar = ("edges",)
    always_reads: ClassVar = ("phi",)
    kind: Literal["hetero"] = "hetero"
    base: StaticTree  # to be extended or pruned
    edges: Array = Field(min_length=1, max_length=MAX_EDGES)
    """Ascending Φ thresholds, nats; bin i holds Φ in (edges[i-1], edges[i]]."""
    gammas: tuple[Annotated[float, Field(gt=0.0, le=4.0)], ...] = (0.3, 0.6, 1.0)
    """One factor per low-entropy bin, lowest entropy first."""
    alpha: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    """Depth extension of the first bin; the paper's best is ceil(depth / 2)."""
    index_base: Literal[0, 1] = 0
    """First value of the paper's i in Δ = alpha - i; 0 is our reading."""
    cap_tokens: bool = False  # submit at most `base.num_tokens` (gamma 1.0 would add Δ)
    path: Literal["cumulative", "conditional"] = "cumulative"
    """Choice of P*: by cumulative score, or by the last token's own probability."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(increasing(self.edges), "edges must be strictly increasing")
        require(len(self.gammas) <= len(self.edges) + 1, "more gammas than bins")
        require(max(self.plan_depths) <= MAX_DEPTH, f"extended depth exceeds {MAX_DEPTH}")
        require(max(self.plan_tokens) <= MAX_TOKENS, f"extended size exceeds {MAX_TOKENS}")
        return self

    @property
    def extensions(self) -> tuple[int, ...]:
        """Δ of every bin, levels."""
        alpha = math.ceil(self.base.depth / 2) if self.alpha is None else self.alpha
        low = len(self.gammas)
        return tuple(
            max(0, alpha - r - self.index_base) if r < low else 0
            for r in range(len(self.edges) + 1)
        )

    @property
    def plan_depths(self) -> tuple[int, ...]:
        """Drafted levels of every bin."""
        return tuple(self.base.depth + extension for extension in self.extensions)

    @property
    def plan_tokens(self) -> tuple[int, ...]:
        """Submitted nodes of every bin, root counted."""
        size = self.base.num_tokens
        gammas = self.gammas + (1.0,) * (len(self.edges) + 1 - len(self.gammas))
        plans = zip(gammas, self.extensions, self.plan_depths, strict=True)
        wanted = (max(math.ceil(g * size + more), depth + 1) for g, more, depth in plans)
        return tuple(
            min(n, max(size, d + 1)) if self.cap_tokens else n
            for n, d in zip(wanted, self.plan_depths, strict=True)
        )


@dataclass(kw_only=True)
class EntropyBinsShape(BaseShape):
    """Drafts the base depth, reads Φ, then extends and prunes by bin (sections 4.1 to 4.3)."""

    base_depth: int
    conditional: bool
    edges: Tensor  # `[E]` float32, nats
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
        if plan.bins is None:  # no bin extends the draft, and `grow` skips the last level
            self._choose_bins(plan, pool)
        assert plan.bins is not None
        return best_nodes(pool, self.max_tokens, limit=self.bin_tokens[plan.bins])

    def _choose_bins(self, plan: Plan, pool: DraftPool) -> None:
        plan.bins = entropy_bin(phi(pool, conditional=self.conditional), self.edges)
        plan.max_depth = self.bin_depths[plan.bins]


def as_wide_as_one(base: StaticTree) -> StaticTree:
    """The base tree's likeliest path, over which Φ is summed and whose length bins choose."""
    return StaticTree(depth=base.depth, top_k=1, num_tokens=base.depth + 1)


def entropy_bin(value: Tensor, edges: Tensor) -> Tensor:
    """`[B]` int64: the number of edges strictly below each value; NaN is in the last bin."""
    return torch.bucketize(value, edges, right=False)


def entropy_bins_shape(record: EntropyBins, device: Device) -> EntropyBinsShape:
    depths, tokens, top_k = record.plan_depths, record.plan_tokens, record.base.top_k
    edges = torch.tensor(record.edges, dtype=torch.float32, device=device)
    return EntropyBinsShape(
        *(max(depths), top_k, top_k, max(tokens)),
        device,
        base_depth=record.base.depth,
        conditional=record.path == "conditional",
        edges=edges,
        bin_depths=torch.tensor(depths, device=device),
        bin_tokens=torch.tensor(tokens, device=device),
    )


HETERO = ShapeFamily(
    record=EntropyBins,
    rule=entropy_bins_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=True,
    is_ranked=never,
    kernel="bins",
    withholds=prunes,
    fitted_grid=grid(
        num_tokens="12 16 24 32 48 64",
        alpha="0 1 2 3 4 6",
        gammas="0.3/0.6/1.0 0.5/0.75/1.0 1.0/1.0/1.0",
    ),
    shared_fitted_grid=grid(num_tokens="24 48"),
    places={"num_tokens": ("base", "num_tokens")},
    chain=lambda record: record.model_copy(update={"base": as_wide_as_one(record.base)}),
)
