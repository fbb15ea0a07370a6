"""Submitted trees: of all positions, flat; of a batch, padded, as a budget is asked about them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.logs.logged_draft import LoggedDraft
from specctl.policy.rules import Plan
from specctl.tree import PAD, TokenTree, take


@dataclass(frozen=True)
class SubmittedNodes:
    """The submitted trees, flat, one after another: 24 bytes a node.

    Attributes:
        start: `[R + 1]` int64, first node of each position.
        parent: `[T]` int32, index within the tree. depth, sibling_rank: `[T]` int8.
        draft_logp, joint_logp, entropy, topk_entropy: `[T]` float32, as in `DraftPool`.
        expanded, on_path: `[T]` bool.
        plan_depth: `[R]` int8, levels of the shape's plan. stopped_at: `[R]` int8, where a gate
            closed, 0 for nowhere.
    """

    start: Tensor
    parent: Tensor
    depth: Tensor
    sibling_rank: Tensor
    draft_logp: Tensor
    joint_logp: Tensor
    entropy: Tensor
    topk_entropy: Tensor
    expanded: Tensor
    on_path: Tensor
    plan_depth: Tensor
    stopped_at: Tensor

    def batch(self, rows: Tensor) -> SubmittedBatch:
        """The trees of some positions side by side, padded to the largest."""
        sizes = self.start[rows + 1] - self.start[rows]
        slots = torch.arange(int(sizes.max()))
        valid = slots < sizes[:, None]
        index = (self.start[rows, None] + slots).masked_fill(~valid, 0)

        def read(values: Tensor, fill: float) -> Tensor:
            return values[index].masked_fill(~valid, fill)

        parent, depth = read(self.parent, PAD).long(), read(self.depth, 0).long()
        tree = TokenTree(torch.zeros_like(parent), parent, depth, read(self.draft_logp, 0.0))
        pool = DraftPool(
            tree=tree,
            joint_logp=read(self.joint_logp, float("-inf")),
            entropy=read(self.entropy, 0.0),
            topk_entropy=read(self.topk_entropy, 0.0),
            sibling_rank=read(self.sibling_rank, 0).long(),
            expanded=read(self.expanded, False),
        )
        submitted = slots.expand_as(parent).masked_fill(~valid, -1)
        stopped_at = self.stopped_at[rows].long()
        plan = Plan(len(rows), self.plan_depth[rows].long(), stopped_at=stopped_at)
        return SubmittedBatch(plan, pool, submitted, read(self.on_path, False))


@dataclass(frozen=True)
class SubmittedBatch:
    """What the budget of one round is asked about: A positions, N slots.

    Attributes:
        plan: the shape's, as drafting left it.
        pool: the submitted nodes alone; what was drafted and not submitted cannot be verified,
            so no budget may ask for it. Token ids are not logged for replay and stay 0.
        submitted: `[A, N]` int64 indices into the pool, -1 padded.
        on_path: `[A, N]` bool.
    """

    plan: Plan
    pool: DraftPool
    submitted: Tensor
    on_path: Tensor


def nodes_of(draft: LoggedDraft, on_path: Tensor) -> SubmittedNodes:
    """The submitted trees of some positions. `on_path`: `[B, N]` bool."""
    pool, plan, valid = draft.pool, draft.plan, draft.submitted >= 0
    stopped_at = torch.zeros_like(plan.max_depth) if plan.stopped_at is None else plan.stopped_at
    tree = take(pool.tree, draft.submitted)

    def read(values: Tensor) -> Tensor:
        return values.gather(1, draft.submitted.clamp(min=0))[valid]

    return SubmittedNodes(
        start=torch.cat([torch.zeros(1, dtype=torch.int64), valid.sum(1).cumsum(0)]),
        parent=tree.parent[valid].to(torch.int32),
        depth=tree.depth[valid].to(torch.int8),
        sibling_rank=read(pool.sibling_rank).to(torch.int8),
        draft_logp=tree.draft_logp[valid],
        joint_logp=read(pool.joint_logp),
        entropy=read(pool.entropy),
        topk_entropy=read(pool.topk_entropy),
        expanded=read(pool.expanded),
        on_path=on_path[valid],
        plan_depth=plan.max_depth.to(torch.int8),
        stopped_at=stopped_at.to(torch.int8),
    )


def join_nodes(parts: list[SubmittedNodes]) -> SubmittedNodes:
    """The trees of all parts, in order."""
    sizes = torch.cat([part.start.diff() for part in parts])
    start = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    names = [field.name for field in fields(SubmittedNodes)[1:]]
    return SubmittedNodes(start, *(torch.cat([getattr(p, n) for p in parts]) for n in names))
