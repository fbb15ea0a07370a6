"""Trees that a policy's shape submits at every position of a log, for simulated batches.

Drafts do not depend on the batch, so they are made once for all positions. The simulation then
decides which requests share a batch and how a shared budget trims their trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specctl.errors import UsageError
from specctl.lazy import Tensor, inference, torch
from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.positions import Longs, Positions, join_rows
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import (
    Budget,
    Chain,
    ChainSchedule,
    PerRequest,
    Policy,
    RootOnly,
    build_budget,
    build_shape,
)
from specctl.policy.rules import Plan
from specctl.replay.outcomes import (
    Outcomes,
    check_replayable,
    is_online,
    map_policies,
    outcomes_at,
    walk_online,
)
from specctl.tree import PAD, DraftPool, take

Verify = Callable[[Longs, int], tuple[Longs, Longs]]
"""From positions `[A]` and the batch size for a `ChainSchedule` to verified nodes, root included,
and accepted draft tokens, `[A]` each."""
POOLED = ("sibling_rank", "joint_logp", "entropy", "topk_entropy", "expanded")
NODE = np.dtype(
    {
        "names": ("parent", "depth", "draft_logp", *POOLED, "on_path"),
        "formats": ("i4", "i1", "f4", "i1", "f4", "f4", "f4", "?", "?"),
    }
)
"""A submitted node, 24 bytes: its parent within the tree, and values as in `DraftPool`."""
EMPTY = np.array((PAD, 0, 0.0, 0, -np.inf, 0.0, 0.0, False, False), NODE)


@dataclass(frozen=True)
class SubmittedNodes:
    """The submitted trees of R positions, flat, one after another."""

    size: Longs  # `[R]` nodes of each position
    plan_depth: Longs  # `[R]` levels of the shape's plan
    stopped_at: Longs  # `[R]` level at which a gate closed, 0 for none
    nodes: NDArray[np.void]  # `[T]` of `NODE`

    @classmethod
    def of(cls, draft: LoggedDraft) -> SubmittedNodes:
        pool, plan, valid = draft.pool, draft.plan, draft.submitted >= 0
        stopped = torch.zeros_like(plan.max_depth) if plan.stopped_at is None else plan.stopped_at
        tree, index = take(pool, draft.submitted), draft.submitted.clamp(min=0)
        columns = {name: getattr(tree, name) for name in ("parent", "depth", "draft_logp")}
        columns |= {name: getattr(pool, name).gather(1, index) for name in POOLED}
        nodes = np.empty(int(valid.sum()), NODE)
        for name, values in {**columns, "on_path": draft.on_path}.items():
            nodes[name] = values[valid].numpy()
        return cls(valid.sum(1).numpy(), plan.max_depth.numpy(), stopped.numpy(), nodes)

    @cached_property
    def start(self) -> Longs:
        """`[R]` first node of each position."""
        return np.cumsum(self.size) - self.size

    def batch(self, rows: Longs) -> tuple[Plan, DraftPool, Tensor, Tensor]:
        """The trees of A positions side by side, padded to the largest, N slots.

        Returns:
            The shape's plan after drafting; the submitted nodes alone, token ids 0; `[A, N]` int64
            indices into them, -1 padded; and `[A, N]` bool, on the path of the text.
        """
        slots = np.arange(self.size[rows].max())
        valid = slots < self.size[rows, None]
        index = np.where(valid, self.start[rows, None] + slots, 0)
        table = np.where(valid, self.nodes[index], EMPTY)
        columns = {name: torch.from_numpy(table[name].copy()) for name in NODE.fields or ()}
        parent, depth = columns["parent"].long(), columns["depth"].long()
        columns["sibling_rank"] = columns["sibling_rank"].long()
        nodes = (torch.zeros_like(parent), parent, depth, columns["draft_logp"])
        pool = DraftPool(*nodes, **{name: columns[name] for name in POOLED})
        plan_depth, stopped = (
            torch.from_numpy(of[rows]) for of in (self.plan_depth, self.stopped_at)
        )
        submitted = torch.from_numpy(np.where(valid, slots, -1))
        plan = Plan(len(rows), plan_depth, stopped_at=stopped)
        return plan, pool, submitted, columns["on_path"]


@dataclass(frozen=True)
class Submissions:
    """Drafts and outcomes of one policy's shape at R positions.

    A shape that learns from a request's earlier rounds has outcomes at the starts of its rounds,
    and 0 elsewhere. Without a shared budget, its rounds do not depend on the batch.
    """

    policy: Policy
    positions: Positions
    # `[R]`, if a request verifies all that it submits; for a schedule, of its longest chain
    outcomes: Outcomes
    max_tokens: int  # most nodes submitted, root counted
    nodes: SubmittedNodes | None = None  # the trees; None unless a budget needs them

    @property
    def drafts(self) -> bool:
        return self.max_tokens > 1

    def verification(self, budget: Budget, batch_size: int) -> Verify:
        """Sizes and outcomes of requests at given positions, under a budget."""
        rule = None
        if not isinstance(budget, PerRequest):  # keeps all, without torch
            rule = build_budget(budget, batch_size=batch_size, max_tokens=self.max_tokens)
        accepted = self.outcomes.accepted.astype(np.int64)
        verified = self.outcomes.verified.astype(np.int64)
        schedule = self.policy.shape
        if isinstance(schedule, ChainSchedule):

            def by_size(rows: Longs, batch_size: int) -> tuple[Longs, Longs]:
                length = schedule.length_at(batch_size)
                return np.full(len(rows), length + 1), np.minimum(accepted[rows], length)

            return by_size
        if rule is None or not self.drafts:
            return lambda rows, _: (verified[rows], accepted[rows])
        assert self.nodes is not None, "made for a policy without a shared budget"
        nodes, remaining = self.nodes, torch.tensor(self.positions.remaining)

        @inference
        def shared(rows: Longs, batch_size: int) -> tuple[Longs, Longs]:
            del batch_size
            plan, pool, submitted, on_path = nodes.batch(rows)
            kept = rule.share(plan, pool, submitted)
            taken = (on_path.gather(1, kept.clamp(min=0)) & (kept >= 0)).sum(1) - 1
            return (kept >= 0).sum(1).numpy(), torch.minimum(taken, remaining[rows]).numpy()

        return shared

    def outcomes_of(self, rows: Longs, verified: Longs, accepted: Longs) -> Outcomes:
        """Outcomes of rounds at positions `[L]` with these sizes.

        A chain of a schedule lacks an expansion only within its own length.
        """
        found, taken = self.outcomes.at(rows), accepted.astype(np.int32)
        if not isinstance(self.policy.shape, ChainSchedule):
            return replace(found, accepted=taken, verified=verified.astype(np.int32))
        drafted = verified - 1
        ran_out = (found.censored > 0) & (drafted > accepted)
        lacks = ran_out | ((found.missing > 0) & (drafted > found.levels))
        missing = np.where(lacks, found.missing, 0)
        return Outcomes.of(
            taken,
            verified=verified,
            levels=drafted,
            wanted=np.maximum(drafted, missing),
            missing=missing,
            censored=ran_out,
        )


def shares(policy: Policy) -> bool:
    """Whether the requests of a batch share a budget that trims their drafts."""
    return not isinstance(policy.budget, PerRequest) and not isinstance(policy.shape, RootOnly)


def submissions_of(log: DenseLog, policies: Sequence[Policy]) -> list[Submissions]:
    """The submissions of every policy, in one pass over the log; with trees under a shared
    budget."""
    for policy in policies:
        check_replayable(policy.model_copy(update={"budget": PerRequest()}))
        learns = is_online(policy)
        if (learns or isinstance(policy.shape, ChainSchedule)) and shares(policy):
            found = "learns from what the budget lets it verify" if learns else "asks for the batch"
            raise UsageError(
                f"{policy.name} cannot be replayed under a shared budget: its shape, "
                f"{policy.shape.kind}, {found}",
                hint="compare it live: specctl run --compare, or leave the budget out",
            )

    @inference
    def submit(policy: Policy, chunk: LogChunk) -> Submissions:
        positions, shape = chunk.positions, policy.shape
        if isinstance(shape, ChainSchedule):
            shape = Chain(num_draft_tokens=max(shape.num_draft_tokens))
        rule = build_shape(shape)
        if rule.memory_size:
            visited, found = walk_online(rule, chunk)
            return Submissions(policy, positions, found.spread(visited), rule.max_tokens)
        outcomes, nodes, keeps = [], [], shares(policy)
        for draft in logged_drafts(rule, chunk):
            outcomes.append(outcomes_at(draft))
            if keeps:
                nodes.append(SubmittedNodes.of(draft))
        trees = join_rows(nodes) if keeps else None
        return Submissions(policy, positions, join_rows(outcomes), rule.max_tokens, trees)

    with_entropy = any(map(shares, policies))
    parts = map_policies(log, policies, submit, with_entropy=with_entropy)
    return [join_rows(of) for of in zip(*parts, strict=True)]
