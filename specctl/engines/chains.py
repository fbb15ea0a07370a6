"""A policy's rules on the chains that an engine drafts, level by level.

The engine owns the loop. After each level it asks whether any request goes on; at the end, how many
draft tokens of each to verify. Later it reports how many were accepted:

    engine    draft ── level 1 ──► goes_on ── level 2 ──► ... ──► kept ── verify ──► observe
    rules     begin                  grow                   select, share             observe

The rule objects are those of replay and of our decode loop. Failures are raised; the engine then
verifies its drafts as it was set up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specctl.errors import EngineError, LossyPolicyError
from specctl.features import ENTROPY_TOP_K
from specctl.kernels.node_features import best_and_entropy, node_features
from specctl.policy import (
    PerRequest,
    Policy,
    Strict,
    as_chain,
    build_budget,
    build_shape,
    check_costs,
    policy_digest,
)
from specctl.policy.growing import Growth, pool_capacity
from specctl.policy.rules import Frontier, Plan, RoundStart, is_fixed
from specctl.policy.verification import Outcome
from specctl.runtime.runnable import selected
from specctl.tree import Children, take

Reads = Literal["nothing", "probability and entropy", "everything"]
"""The features of a draft token that rules need: none if the length is known beforehand. Few rules
need the entropy of the top K, which is half the work of all."""
TOPK_ENTROPY = frozenset({"parent_topk_entropy", "phi"})


class DraftedLevel(NamedTuple):
    """One drafted token of each of B requests, `[B]` each."""

    token_ids: Tensor  # of the target's vocabulary
    logp: Tensor  # given the parent
    entropy: Tensor  # of the drafter's distribution
    topk_entropy: Tensor

    @classmethod
    def of(cls, token_ids: Tensor, logits: Tensor, reads: Reads = "everything") -> DraftedLevel:
        """The level of the drafted (likeliest) tokens and the drafter's logits `[B, V]` over target
        ids; NaN in features that are not read."""
        unread = torch.full_like(token_ids, torch.nan, dtype=torch.float32)
        if reads == "nothing":
            return cls(token_ids, unread, unread, unread)
        if reads == "probability and entropy":
            return cls(token_ids.long(), *best_and_entropy(logits), unread)
        found = node_features(logits, 1, ENTROPY_TOP_K)
        return cls(token_ids.long(), found.top_logp[..., 0], found.entropy, found.topk_entropy)


@dataclass
class ChainDraft:
    """Chains of B requests, while they are drafted under a policy."""

    request_ids: list[str]  # in the engine's order
    plan: Plan
    growth: Growth
    frontier: Frontier
    depth: int = 0  # levels drafted
    submitted: Tensor | None = None  # `[B, N]` pool indices to verify, at the end of drafting

    @property
    def wants_more(self) -> bool:
        """Whether any request wants another level."""
        return bool(self.frontier.keep.any())

    @property
    def offered(self) -> Tensor:
        """`[B]` int64: levels offered to each request."""
        if self.growth.level.depth == 0:  # no level was read: the plan has their number
            return self.plan.max_depth.clamp(max=self.depth)
        tree = self.growth.level.pool
        return tree.depth.masked_fill(~tree.valid, 0).amax(1)


class ChainPolicy:
    """The rules of a policy for up to `batch_size` requests of an engine that drafts chains.

    Args:
        max_levels: most draft tokens that the engine makes in a step.

    Attributes:
        policy: the policy on chains.
        digest: its digest.
        reads: features to read of each level.
        spent_us: time in rules since the caller set it to 0.

    Raises:
        LossyPolicyError: a policy with an acceptance; the engine's own rule decides.
        EngineError: a policy that may draft more levels than the engine.
        UsageError: a budget that cannot be decided, or is smaller than the batch.
    """

    def __init__(
        self, policy: Policy, *, max_levels: int, batch_size: int, device: torch.device
    ) -> None:
        if not isinstance(policy.acceptance, Strict):
            raise LossyPolicyError(
                f"policy {policy.name} has the acceptance {policy.acceptance.kind}, but in an "
                "engine the engine's own rule accepts",
                hint="export a policy without one, or run this one with `specctl run`",
            )
        self.policy = as_chain(policy)
        self.digest = policy_digest(self.policy)
        check_costs(self.policy.budget)
        shape = build_shape(self.policy.shape, device)
        if shape.max_depth > max_levels:
            raise EngineError(
                f"policy {self.policy.name} drafts up to {shape.max_depth} tokens, and the engine "
                f"{max_levels}",
                hint=f"start the engine with num_speculative_tokens {shape.max_depth}",
            )
        budget = build_budget(
            self.policy.budget, batch_size=batch_size, max_tokens=shape.max_depth + 1, device=device
        )
        self.shape, self.spent_us, self._budget = shape, 0.0, budget
        self.reads: Reads = "probability and entropy"
        if TOPK_ENTROPY.intersection(self.policy.shape.reads):
            self.reads = "everything"
        elif not self.shares and is_fixed(shape):
            self.reads = "nothing"
        self._device = device
        self._nothing = torch.zeros(shape.memory_size, dtype=torch.float64, device=device)
        self._memory: dict[str, Tensor] = {}

    @property
    def learns(self) -> bool:
        """Whether the rule learns from outcomes, so that `observe` must be called."""
        return self.shape.memory_size > 0

    def begin(
        self, request_ids: list[str], root_ids: Tensor, recent: Tensor | None = None
    ) -> ChainDraft:
        """Starts a round.

        Args:
            root_ids: `[B]` int64, each request's last token.
            recent: `[B, RECENT_TOKENS]`, if the rule needs the text.
        """
        began = time.perf_counter()
        memory = torch.stack([self._memory.get(one, self._nothing) for one in request_ids])
        plan = self.shape.begin(RoundStart(len(request_ids), memory, len(request_ids)))
        index = torch.zeros_like(root_ids[:, None])
        frontier = Frontier(index, plan.max_depth[:, None] > 0)
        growth = Growth(root_ids, pool_capacity(self.shape), recent)
        self._spend(began)
        return ChainDraft(request_ids, plan, growth, frontier)

    def grow(self, draft: ChainDraft, level: DraftedLevel) -> None:
        """Takes a drafted level, after which `draft.wants_more` decides on another."""
        began = time.perf_counter()
        draft.depth += 1
        if self.reads == "nothing":
            keep = (draft.plan.max_depth > draft.depth)[:, None]
            draft.frontier = Frontier(draft.frontier.index, keep)
            self._spend(began)
            return
        columns = (level.token_ids, level.logp, level.entropy, level.topk_entropy)
        ids, logp, entropy, topk_entropy = (one[:, None] for one in columns)
        children = Children(ids[..., None], logp[..., None], entropy, topk_entropy)
        reached = draft.growth.append(draft.frontier, children)
        if draft.depth < self.shape.max_depth:
            draft.frontier = self.shape.grow(draft.plan, reached)
        else:
            draft.frontier = Frontier(draft.frontier.index, torch.zeros_like(draft.frontier.keep))
        self._spend(began)

    @property
    def shares(self) -> bool:
        """Whether requests of a batch share a budget."""
        return not isinstance(self.policy.budget, PerRequest)

    def kept(self, draft: ChainDraft, ended: Sequence[int] = ()) -> Tensor:
        """`[B]` int64: how many draft tokens of each chain to verify.

        Args:
            ended: rows whose texts are complete; they get none of a shared budget.
        """
        if self.reads == "nothing":
            return draft.offered
        began, plan, pool = time.perf_counter(), draft.plan, draft.growth.level.pool
        submitted = selected(self.shape, plan, pool)
        if ended:
            going = torch.ones(len(submitted), dtype=torch.bool, device=self._device)
            going[list(ended)] = False
            [rows] = going.nonzero(as_tuple=True)
            stopped_at = None if plan.stopped_at is None else plan.stopped_at[rows]
            plan = Plan(len(rows), plan.max_depth[rows], None, stopped_at)
            pool, whole = pool.rows(rows), torch.full_like(submitted, -1)
            whole[:, 0] = 0
            if len(rows):
                shared = self._budget.share(plan, pool, submitted[rows])
                whole[rows, : shared.shape[1]] = shared
            draft.submitted = whole
        else:
            draft.submitted = self._budget.share(plan, pool, submitted)
        self._spend(began)
        return (draft.submitted >= 0).sum(1) - 1

    def observe(self, draft: ChainDraft, rows: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Learns from a verification.

        Args:
            rows: verified rows of the draft.
            num_accepted: admitted draft tokens of each.
        """
        if not self.learns or draft.submitted is None or not rows:
            return
        began = time.perf_counter()
        at = torch.tensor(rows, device=self._device)
        accepted = torch.tensor(num_accepted, device=self._device)[:, None]
        pool, submitted = draft.growth.level.pool.rows(at), draft.submitted[at]
        tree = take(pool, submitted)
        slots = torch.arange(submitted.shape[1], device=self._device)
        path = slots.expand_as(submitted).masked_fill(slots > accepted, -1)
        names = [draft.request_ids[row] for row in rows]
        before = torch.stack([self._memory.get(name, self._nothing) for name in names])
        target_ids = torch.full_like(
            submitted, -1
        )  # the engine keeps them, and no shape reads them
        after = self.shape.observe(before, Outcome(pool, submitted, tree, path, target_ids))
        self._memory.update(zip(names, after.unbind(0), strict=True))
        self._spend(began)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the memory of requests that have ended."""
        for name in request_ids:
            self._memory.pop(name, None)

    def _spend(self, began: float) -> None:
        self.spent_us += 1e6 * (time.perf_counter() - began)
