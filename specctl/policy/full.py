"""The full tree: everything that a dense log holds, drafted and submitted.

The frontier of a level is its best `width` candidates and, if nested, for every j <= top_k the
frontier of the static tree of (top_k j, width j). Such a tree contains every chain and every
static tree of the same drafter whose depth and top_k are not larger, node for node:

    level 1   a  b  c      static tree 1 (the chain) expands a
    top_k 3                static tree 2 expands a, b
                           static tree 3 expands a, b, c

At level 2 the first child of `b` may be among the best two of tree 2 and not among the best
three of tree 3, where two children of `c` are better: the best of a wide level need not contain
the best of a narrow one. Who belongs to which static tree is carried from level to level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specctl.policy.records import FullTree
from specctl.policy.rules import BaseShape, Frontier, Level, Plan, RoundStart, rows_below


@dataclass
class NestedPlan(Plan):
    """Also remembers who was expanded for whom.

    Attributes:
        owners: `[B, W, K]` bool: static tree j + 1 expands the w-th node of the last frontier.
    """

    owners: Tensor | None = None


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
        keep, slots = _kept_first(keep)
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


def _kept_first(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Moves what is kept to the front, in order, and drops the columns that no row needs.

    Returns:
        `keep` `[B, W]` and where each column came from, `[B, W]` int64.
    """
    widest = max(1, int(keep.sum(1).max()))
    moved, slots = keep.sort(dim=1, descending=True, stable=True)
    return moved[:, :widest], slots[:, :widest]


def full_shape(record: FullTree, device: torch.device) -> BaseShape:
    """The rule of a full tree."""
    best = record.width or record.top_k
    # All frontiers together, if no two shared a node; the frontier itself is no wider than found.
    width = best + record.nested * record.top_k * (record.top_k + 1) // 2
    size = 1 + record.top_k + (record.depth - 1) * width * record.top_k
    if record.nested:
        return NestedShape(record.depth, record.top_k, width, size, device, best=best)
    return BaseShape(record.depth, record.top_k, width, size, device)
