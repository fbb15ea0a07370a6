"""Shapes without learned parameters: plain decoding, chains, chains by batch size, EAGLE-2's tree,
and the full tree.

`FullTree` drafts and submits everything that a dense log holds. The frontier of a level is its best
`width` candidates and, if nested, for every j <= top_k the frontier of the static tree of (top_k j,
width j). Such a tree contains every chain and every static tree of the same drafter up to its depth
and top_k, node for node:

    level 1   a  b  c      static tree 1 (the chain) expands a
    top_k 3                static tree 2 expands a, b
                           static tree 3 expands a, b, c

At level 2 the first child of `b` may be among the best two of tree 2 and not among the best three
of tree 3, where two children of `c` are better: the best of a wide level may lack the best of a
narrow one. So each node carries the static trees that it belongs to from level to level."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, Self, cast

from pydantic import model_validator

from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import (
    LEVELS,
    Depth,
    Length,
    NumTokens,
    Shape,
    ShapeFamily,
    TopK,
    always,
    grid,
    prunes,
)
from specctl.policy.rules import BaseShape, Frontier, Level, Plan, RoundStart, rows_below
from specctl.records import PositiveInt, increasing, require


class RootOnly(Shape):
    """Plain autoregressive decoding: no drafting, one token a call."""

    kind: Literal["ar"] = "ar"


class Chain(Shape):
    """A fixed chain of the drafter's likeliest tokens."""

    kind: Literal["chain"] = "chain"
    num_draft_tokens: Depth = 4  # K, draft tokens a round (vLLM's `num_speculative_tokens`)


class StaticTree(Shape):
    """EAGLE-2's dynamic tree with fixed size (arXiv:2406.16858)."""

    kind: Literal["eagle2"] = "eagle2"
    depth: Depth = 6
    """Drafted levels. EAGLE's own `depth` d drafts d + 1 of them; SGLang's `num_steps` is this
    number."""
    top_k: TopK = 8  # children per expanded node and nodes expanded per level
    num_tokens: NumTokens = 48
    """Nodes submitted, **root counted** (EAGLE's `total_token`, SGLang's `num_draft_tokens`)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(
            self.num_tokens > self.depth,
            f"num_tokens counts the root and must exceed depth: {self.num_tokens} <= {self.depth}",
        )
        return self


class ChainSchedule(Shape):
    """A chain whose length depends on the batch size: larger batches draft fewer tokens. vLLM's
    `num_speculative_tokens_per_batch_size`, SGLang's keys by batch size.
    """

    kind: Literal["schedule"] = "schedule"
    from_batch: tuple[PositiveInt, ...]
    """Smallest batch size of each entry, ascending from 1."""
    num_draft_tokens: tuple[Length, ...]  # K of each entry; 0 is plain decoding

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        starts, lengths = self.from_batch, self.num_draft_tokens
        require(starts[:1] == (1,), f"from_batch must begin with 1, found {list(starts[:1])}")
        require(increasing(starts), "from_batch must be strictly increasing")
        require(
            len(starts) == len(lengths),
            f"one length for each of {len(starts)} batch sizes, found {len(lengths)}",
        )
        require(any(lengths), "no batch size drafts: that is ar")
        return self

    def length_at(self, batch_size: int) -> int:
        """K at a batch size."""
        return self.num_draft_tokens[bisect_right(self.from_batch, batch_size) - 1]


def at_batch_size(shape: Shape, batch_size: int) -> Shape:
    """The shape at a fixed batch size: of a schedule the chain of its entry."""
    if not isinstance(shape, ChainSchedule):
        return shape
    length = shape.length_at(batch_size)
    return Chain(num_draft_tokens=length) if length else RootOnly()


def static_shape(record: RootOnly | Chain | StaticTree, device: Device) -> BaseShape:
    """The rule of a static record; a chain is a tree of width 1."""
    if isinstance(record, RootOnly):
        return BaseShape(max_depth=0, top_k=0, width=0, max_tokens=1, device=device)
    if isinstance(record, Chain):
        levels = record.num_draft_tokens
        return BaseShape(levels, top_k=1, width=1, max_tokens=levels + 1, device=device)
    return BaseShape(record.depth, record.top_k, record.top_k, record.num_tokens, device)


@dataclass(kw_only=True)
class ScheduledChain(BaseShape):
    """A chain whose length is looked up when a round begins."""

    record: ChainSchedule

    def begin(self, start: RoundStart) -> Plan:
        length = self.record.length_at(start.batch_size)
        depth = torch.full((start.num_rows,), length, device=self.device)
        return Plan(start.num_rows, depth, deepest=length)


def scheduled_shape(record: ChainSchedule, device: Device) -> BaseShape:
    levels = max(record.num_draft_tokens)
    return ScheduledChain(levels, 1, 1, levels + 1, device, record=record)


AR = ShapeFamily(
    record=RootOnly,
    rule=static_shape,
    is_static=True,
    is_deep=False,
    is_timed=False,
    reads_entropy=False,
    is_ranked=always,
    kernel="static",
    chain=None,
    withholds=prunes,
    words={"ar": {}},
    grids={"ar": {}},
)
CHAIN = ShapeFamily(
    record=Chain,
    rule=static_shape,
    is_static=True,
    is_deep=False,
    is_timed=False,
    reads_entropy=False,
    is_ranked=always,
    kernel="static",
    chain=None,
    withholds=lambda record: None,
    words={"chain": {}},
    short=("num_draft_tokens",),
    grids={"chain": grid(num_draft_tokens=LEVELS)},
    shared_grid=grid(num_draft_tokens="2 3 4 6 8 11"),
)
SCHEDULE = ShapeFamily(
    record=ChainSchedule,
    rule=scheduled_shape,
    is_static=False,
    is_deep=False,
    is_timed=False,
    reads_entropy=False,
    is_ranked=always,
    kernel=None,
    chain=None,
    withholds=lambda record: None,
    words={"schedule": {}},
    grids={
        "schedule": grid(
            from_batch="1/2 1/3 1/5 1/9",
            num_draft_tokens="2/1 3/0 3/1 4/1 4/2 5/0 5/2 5/3 6/2 6/3 8/0 8/3 8/4",
        )
    },
)
EAGLE2 = ShapeFamily(
    record=StaticTree,
    rule=static_shape,
    is_static=True,
    is_deep=True,
    is_timed=False,
    reads_entropy=False,
    is_ranked=always,
    kernel="static",
    withholds=prunes,
    # EAGLE-3's own tree, as ECHO (section C.4) runs it.
    words={"eagle2": {}, "eagle3-paper": {"depth": 8, "top_k": 10, "num_tokens": 60}},
    short=("depth", "top_k", "num_tokens"),
    grids={"eagle2": grid(depth=LEVELS, top_k="2 4 8 10", num_tokens="3 4 6 8 12 16 24 32 48 64")},
    shared_grid=grid(depth="3 5 8", top_k="4 8", num_tokens="8 16 32 64"),
    chain=lambda record: Chain(num_draft_tokens=record.depth),
)


# --------------------------------------------------------------------------- the full tree


class FullTree(Shape):
    """The policy of dense collection, which submits everything drafted (design.md, section 1)."""

    kind: Literal["full"] = "full"
    depth: Depth = 11  # drafted levels
    top_k: TopK = 10  # children per expanded node (C2T's superset: 11 and 10)
    width: TopK | None = None
    """Nodes expanded per level by joint probability; None is `top_k`."""
    nested: bool = True
    """Expand also the frontiers of the static trees of every smaller top_k, so that each of them
    is contained exactly."""


@dataclass
class NestedPlan(Plan):
    """A plan with the static trees of the frontier."""

    owners: Tensor | None = None
    """`[B, W, K]` bool: static tree j + 1 expands the w-th node of the last frontier."""


@dataclass
class NestedShape(BaseShape):
    """The best `best` candidates of every level, and all frontiers of smaller static trees."""

    best: int = 0

    def begin(self, start: RoundStart) -> Plan:
        return NestedPlan(start.num_rows, super().begin(start).max_depth)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        plan = cast(NestedPlan, plan)
        members = self._members(plan, level)
        score, order = level.joint_logp.sort(dim=1, descending=True, stable=True)
        exists = (score > float("-inf"))[..., None]
        members = members.gather(1, order[..., None].expand_as(members)) & exists
        sizes = torch.arange(1, self.top_k + 1, device=order.device)
        owners = members & (members.cumsum(1) <= sizes)
        places = torch.arange(order.shape[1], device=order.device)
        keep = owners.any(-1) | ((places < self.best) & exists[..., 0])
        # Kept nodes move to the front, in order, and columns without any are dropped.
        widest = max(1, int(keep.sum(1).max()))
        moved, slots = keep.sort(dim=1, descending=True, stable=True)
        keep, slots = moved[:, :widest], slots[:, :widest]
        plan.owners = owners.gather(1, slots[..., None].expand(-1, -1, self.top_k))
        frontier = rows_below(plan, level, order.gather(1, slots) + level.start)
        return Frontier(frontier.index, frontier.keep & keep)

    def _members(self, plan: NestedPlan, level: Level) -> Tensor:
        """`[B, C, K]` bool: the candidate is drafted by static tree j + 1."""
        rank, sizes = torch.arange(self.top_k), torch.arange(1, self.top_k + 1)
        drafted = (rank[:, None] < sizes).to(level.joint_logp.device)
        if plan.owners is None:  # the root's children
            return drafted.expand(plan.num_rows, -1, -1)
        return (plan.owners[:, :, None] & drafted).flatten(1, 2)


def full_shape(record: FullTree, device: Device) -> BaseShape:
    best = record.width or record.top_k
    # An upper bound: all frontiers together, if no two shared a node.
    width = best + record.nested * record.top_k * (record.top_k + 1) // 2
    size = 1 + record.top_k + (record.depth - 1) * width * record.top_k
    if record.nested:
        return NestedShape(record.depth, record.top_k, width, size, device, best=best)
    return BaseShape(record.depth, record.top_k, width, size, device)


FULL = ShapeFamily(
    record=FullTree,
    rule=full_shape,
    is_static=False,
    is_deep=False,
    is_timed=False,
    reads_entropy=False,
    is_ranked=always,
    kernel=None,
    withholds=prunes,
    chain=lambda record: Chain(num_draft_tokens=record.depth),
)
