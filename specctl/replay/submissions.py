"""What a policy's shape submits at every position of a log, kept for batches to draw on.

Drafting does not depend on the batch, so it is decided once for all positions; which requests
meet in a batch, and what a shared budget then leaves of their trees, is decided by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.features import DraftPool
from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.positions import Bools, Ints, Longs, Positions, join_positions
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import Budget, PerRequest, Policy, RootOnly, build_budget, build_shape
from specctl.policy.rules import Plan
from specctl.replay.outcomes import (
    check_replayable,
    is_online,
    needs_entropy,
    text_columns,
    walk_online,
)
from specctl.tree import PAD, TokenTree, take

Verify = Callable[[Longs], tuple[Longs, Longs]]
"""From positions `[A]` to nodes verified, root included, and draft tokens accepted, `[A]` each."""


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

    @classmethod
    def of(cls, draft: LoggedDraft) -> SubmittedNodes:
        """The submitted trees of some positions."""
        pool, plan, valid = draft.pool, draft.plan, draft.submitted >= 0
        stopped = torch.zeros_like(plan.max_depth) if plan.stopped_at is None else plan.stopped_at
        tree = take(pool.tree, draft.submitted)

        def read(values: Tensor) -> Tensor:
            return values.gather(1, draft.submitted.clamp(min=0))[valid]

        return cls(
            start=torch.cat([torch.zeros(1, dtype=torch.int64), valid.sum(1).cumsum(0)]),
            parent=tree.parent[valid].to(torch.int32),
            depth=tree.depth[valid].to(torch.int8),
            sibling_rank=read(pool.sibling_rank).to(torch.int8),
            draft_logp=tree.draft_logp[valid],
            joint_logp=read(pool.joint_logp),
            entropy=read(pool.entropy),
            topk_entropy=read(pool.topk_entropy),
            expanded=read(pool.expanded),
            on_path=draft.on_path[valid],
            plan_depth=plan.max_depth.to(torch.int8),
            stopped_at=stopped.to(torch.int8),
        )

    @classmethod
    def join(cls, parts: Sequence[SubmittedNodes]) -> SubmittedNodes:
        """The trees of all parts, in order."""
        sizes = torch.cat([part.start.diff() for part in parts])
        start = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        names = [field.name for field in fields(cls)[1:]]
        return cls(start, *(torch.cat([getattr(p, n) for p in parts]) for n in names))

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


class SubmittedBatch(NamedTuple):
    """What the budget of one round decides about: A positions, N slots.

    Attributes:
        plan: the shape's, as drafting left it.
        pool: the submitted nodes alone; what was drafted and not submitted cannot be verified.
            Token ids are not logged for replay and stay 0.
        submitted: `[A, N]` int64 indices into the pool, -1 padded.
        on_path: `[A, N]` bool.
    """

    plan: Plan
    pool: DraftPool
    submitted: Tensor
    on_path: Tensor


@dataclass(frozen=True)
class Submissions:
    """What one policy's shape does at R positions; int32 arrays `[R]`, 24 bytes a position.

    Of a shape that learns from a request's earlier rounds only the positions that its rounds
    start from are known, and the others are 0: a request always stands at one of these, because
    without a shared budget its rounds do not depend on who shares its batch.

    Attributes:
        drafts: the shape drafts at all.
        max_tokens: nodes submitted at most, root counted.
        accepted, verified: where a request verifies all that it submits.
        levels, wanted, missing, censored: as in `Outcomes`.
        nodes: the trees; None where no budget needs them.
        chain_lengths: draft tokens by the size of the batch, `[largest + 1]`, of chains; then
            `accepted`, `verified` and `levels` are those of the longest. None for most policies.
    """

    policy: Policy
    positions: Positions
    drafts: bool
    max_tokens: int
    accepted: Ints
    verified: Ints
    levels: Ints
    wanted: Ints
    missing: Ints
    censored: Ints
    nodes: SubmittedNodes | None = None
    chain_lengths: Longs | None = None

    def verification(self, budget: Budget, batch_size: int) -> Verify:
        """What a budget verifies of the requests that stand at given positions."""
        rule = build_budget(budget, batch_size=batch_size, max_tokens=self.max_tokens)
        accepted, verified = self.accepted.astype(np.int64), self.verified.astype(np.int64)
        lengths = self.chain_lengths
        if lengths is not None:

            def by_size(rows: Longs) -> tuple[Longs, Longs]:
                length = lengths[min(len(rows), len(lengths) - 1)]
                return np.full(len(rows), length + 1), np.minimum(accepted[rows], length)

            return by_size
        if isinstance(budget, PerRequest) or not self.drafts:
            return lambda rows: (verified[rows], accepted[rows])
        if self.nodes is None:
            raise UsageError(
                "shared budget",
                expected="submissions with their trees",
                found="counts alone",
                fix="prepare them with keep_nodes",
            )
        nodes, remaining = self.nodes, torch.tensor(self.positions.remaining)

        @torch.inference_mode()
        def shared(rows: Longs) -> tuple[Longs, Longs]:
            where = torch.from_numpy(rows)
            batch = nodes.batch(where)
            kept = rule.share(batch.plan, batch.pool, batch.submitted)
            taken = (batch.on_path.gather(1, kept.clamp(min=0)) & (kept >= 0)).sum(1) - 1
            return (kept >= 0).sum(1).numpy(), torch.minimum(taken, remaining[where]).numpy()

        return shared


COUNTS = ("accepted", "verified", "levels", "wanted", "missing", "censored")


def shares(policy: Policy) -> bool:
    """Whether the requests of a batch depend on each other: the policy has a budget that trims."""
    return not isinstance(policy.budget, PerRequest) and not isinstance(policy.shape, RootOnly)


def submissions_of(
    log: DenseLog,
    policies: Sequence[Policy],
    *,
    keep_nodes: bool = False,
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
) -> list[Submissions]:
    """Decides for every position under every policy, in one pass over the log.

    Args:
        keep_nodes: also where the policy's own budget does not need them, so that other budgets
            can be tried over the same shape.
        num_threads: chunks decided at a time; results do not depend on it.
        on_positions: called with the positions of each finished chunk.

    Raises:
        UsageError: a lossy policy, or a budget over a shape whose rounds would then depend on
            the batch. TraceError: see `DenseLog`.
    """
    for policy in policies:
        check_replayable(policy.model_copy(update={"budget": PerRequest()}))
    kept = [shares(policy) or keep_nodes for policy in policies]
    for policy, keep in zip(policies, kept, strict=True):
        if keep and is_online(policy):  # what it drafts depends on what was verified before
            raise UsageError(
                f"replay of {policy.name} under a shared budget",
                expected="a shape that decides by the position alone",
                found=f"{policy.shape.kind}, which learns from what the budget lets it verify",
                fix="compare it live: specctl run --compare, or leave the budget out",
            )

    def decide(chunk: LogChunk) -> list[_Part]:
        return [_decided(p, chunk, keep_nodes=k) for p, k in zip(policies, kept, strict=True)]

    chunks = log.each(
        decide,
        with_entropy=any(kept) or any(needs_entropy(policy) for policy in policies),
        extra=text_columns(policies),
        num_threads=num_threads,
        on_positions=on_positions,
    )
    parts = zip(*chunks, strict=True)
    return [_joined(policy, found) for policy, found in zip(policies, parts, strict=True)]


class _Part(NamedTuple):
    """One chunk: its positions, `[6, R]` int32 in the order of `COUNTS`, and its trees."""

    positions: Positions
    counts: Ints
    nodes: SubmittedNodes | None


@torch.inference_mode()
def _decided(policy: Policy, chunk: LogChunk, *, keep_nodes: bool) -> _Part:
    positions, rule = chunk.positions, build_shape(policy.shape)
    if rule.memory_size:
        visited, outcomes = walk_online(policy, chunk)
        columns = np.zeros((len(COUNTS), positions.num_rows), np.int32)
        columns[:, visited] = [getattr(outcomes, name) for name in COUNTS]
        return _Part(positions, columns, None)
    counts: list[Tensor] = []
    nodes: list[SubmittedNodes] = []
    for draft in logged_drafts(rule, chunk):
        tree = draft.pool.tree
        found = (
            torch.minimum(draft.num_accepted, draft.remaining),
            (draft.submitted >= 0).sum(1),
            tree.depth.masked_fill(~tree.valid, 0).amax(1),
            draft.expansions.wanted,
            draft.expansions.missing,
            draft.expansions.is_open.long(),
        )
        counts.append(torch.stack(found))
        if keep_nodes:
            nodes.append(SubmittedNodes.of(draft))
    columns = torch.cat(counts, 1).to(torch.int32).numpy()
    return _Part(positions, columns, SubmittedNodes.join(nodes) if keep_nodes else None)


def _joined(policy: Policy, parts: Sequence[_Part]) -> Submissions:
    nodes = [part.nodes for part in parts if part.nodes is not None]
    columns = np.concatenate([part.counts for part in parts], 1)
    rule = build_shape(policy.shape)
    return Submissions(
        policy=policy,
        positions=join_positions([part.positions for part in parts]),
        drafts=rule.max_depth > 0,
        max_tokens=rule.max_tokens,
        **dict(zip(COUNTS, columns, strict=True)),
        nodes=SubmittedNodes.join(nodes) if nodes else None,
    )


def emitted_tokens(positions: Positions, row: Longs, accepted: Longs | Ints) -> Longs:
    """`[L]` tokens that rounds emit: the accepted and one more, cut where the text ends."""
    return np.minimum(accepted + 1, positions.remaining[row]).astype(np.int64)


def ends_text(positions: Positions, row: Longs, accepted: Longs | Ints) -> Bools:
    """`[L]` whether the text of a round's request ends in it."""
    ends: Bools = accepted + 1 >= positions.remaining[row]
    return ends
