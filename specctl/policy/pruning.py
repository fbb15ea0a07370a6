"""Trees pruned by a score while they grow: nodes below a threshold are dropped.

The score is the joint probability (`threshold`, the simplest adaptive tree), or a classifier's
(`c2t`). Growth and caps are the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import (
    MAX_TOKENS,
    Depth,
    NumTokens,
    Shape,
    ShapeFamily,
    TopK,
    always,
    grid,
    prunes,
)
from specctl.policy.rules import (
    SORTED_WHOLE,
    BaseShape,
    Frontier,
    Level,
    Plan,
    RoundStart,
    best_nodes,
    top_order,
)
from specctl.records import MAX_FLOAT32, Probability, floor_float32, require
from specctl.tree import DraftPool

Score = Callable[[DraftPool, int], Tensor]
"""`(pool, start) -> [B, P - start]` float32: scores of the nodes from index `start` on, which are
one level or more; higher is better, -inf in empty slots."""
Combine = Callable[[Tensor, Tensor], Tensor]
"""`(parent's score, own score) -> score`, `[B, W, 1]` and `[B, W, K]`. Scores that never exceed the
parent's keep a capped selection a tree."""


@dataclass
class PrunedPlan(Plan):
    """A plan with the scores so far."""

    levels: list[Tensor] = field(default_factory=list)
    """`[B, C]` float32 of each level, combined along the path; -inf in empty slots, inf at the
    root, which is always submitted."""
    of_frontier: Tensor = field(default_factory=lambda: torch.empty(0))
    """`[B, W]` float32, scores of the nodes to expand."""
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    """`[B, P']` of all scored nodes; empty before `select`."""
    num_scored: int = 1


@dataclass(kw_only=True)
class PrunedShape(BaseShape):
    """Expands the best `width` nodes of a level among those that reach `min_score`.

    On a CPU the time of a round is its number of operations, so each level is scored once and its
    scores are kept; a child's parent follows from its place.
    """

    score: Score  # natural log of acceptance
    min_score: float  # nodes below it are neither expanded nor submitted
    combine: Combine | None = None  # with the parent's score; None keeps a node's own
    root_score: float = float("inf")  # the parent's score at the first level
    min_level_prob: float = 0.0  # a level is expanded only if its nodes together reach it

    def begin(self, start: RoundStart) -> Plan:
        plan = super().begin(start)
        always, root = (
            torch.full((plan.num_rows, 1), score, device=self.device)
            for score in (math.inf, self.root_score)
        )
        return PrunedPlan(plan.num_rows, plan.max_depth, levels=[always], of_frontier=root)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        plan = cast(PrunedPlan, plan)
        self._score_new(plan, level.pool)
        plan.of_frontier, beam = best_scores(plan.levels[-1], self.width)
        keep = plan.of_frontier >= self.min_score
        if self.min_level_prob > 0:
            together = (plan.of_frontier.exp() * keep).sum(1, keepdim=True)
            keep = keep & (together >= self.min_level_prob)
        return Frontier(beam + level.start, keep)

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        plan = cast(PrunedPlan, plan)
        self._score_new(plan, pool)
        plan.scores = scores = torch.cat(plan.levels, 1)
        if scores.shape[1] > self.max_tokens:
            kept = scores.masked_fill(scores < self.min_score, -math.inf)
            return best_nodes(pool._replace(joint_logp=kept), self.max_tokens)
        return indices_of(scores >= self.min_score)

    def level_scores(self, of_parent: Tensor, pool: DraftPool, start: int) -> Tensor:
        """`[B, C]`: combined scores of the level at `start`, -inf in empty slots, from the parents'
        `[B, W]`."""
        own = self.score(pool, start)
        if self.combine is None:
            return own
        return self.combine(of_parent[..., None], own.view(*of_parent.shape, -1)).flatten(1)

    def _score_new(self, plan: PrunedPlan, pool: DraftPool) -> None:
        """Scores the level drafted since the last call, if there is one."""
        start, size = plan.num_scored, pool.joint_logp.shape[1]
        if start < size:
            width = (size - start) // self.top_k  # of the frontier as far as it was expanded
            plan.levels.append(self.level_scores(plan.of_frontier[:, :width], pool, start))
            plan.num_scored = size


def best_scores(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best scores of each row, best first, and their indices; see `top_order`."""
    if scores.numel() < SORTED_WHOLE:
        values, order = scores.sort(dim=1, descending=True, stable=True)
        return values[:, :width], order[:, :width]
    order = top_order(scores, width)
    return scores.gather(1, order), order


def indices_of(kept: Tensor) -> Tensor:
    """`[B, P]` int64: indices of true entries of `kept` `[B, P]`, ascending, -1 padded."""
    kept, order = kept.sort(dim=1, descending=True, stable=True)
    return order.masked_fill_(~kept, -1)


# --------------------------------------------------------------------------- joint probability


class JointThreshold(Shape):
    """A tree of all nodes whose paths are likely enough, without a fixed size.

    A node is expanded and submitted iff its joint probability is at least `min_prob`. One
    threshold over all rounds spends nodes where the drafter is sure; learned pruning must beat it
    at the same depth.

    With `min_level_prob` it is the marginal rule. At a rate of λ tokens per us a node is worth its
    time iff its acceptance is at least λ · (us to verify one token more), and a level iff its gain
    is at least λ · (us to draft it). The gain grows with the probability that the text passes one
    of the expanded nodes: the sum of theirs, as at most one node of a level is on the path.
    """

    always_reads: ClassVar = ("joint_prob",)
    kind: Literal["threshold"] = "threshold"
    depth: Depth = 8  # drafted levels at most
    top_k: TopK = 10  # children per expanded node and nodes expanded per level
    min_prob: Annotated[float, Field(ge=0, lt=1)] = 0.05  # of the whole path
    num_tokens: NumTokens | None = None  # cap on submitted nodes, root counted
    min_level_prob: Probability = 0.0
    """Drafting stops if the nodes to expand are together less likely."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        require(
            self.num_tokens is not None or self.most_tokens <= MAX_TOKENS,
            f"may submit {self.most_tokens} nodes, more than {MAX_TOKENS}: give num_tokens",
        )
        return self

    @property
    def most_tokens(self) -> int:
        """Nodes that can reach `min_prob`, root counted: those of a level sum to 1 at most."""
        # Slightly above 1, as probabilities are rounded.
        likely = math.floor(1.001 / self.min_prob) if self.min_prob else MAX_TOKENS**2
        deeper = min(self.top_k**2, likely)
        return 1 + min(self.top_k, likely) + (self.depth - 1) * deeper


def joint_threshold_shape(record: JointThreshold, device: Device) -> PrunedShape:
    most = min(record.num_tokens or record.most_tokens, record.most_tokens)
    size = (record.depth, record.top_k, record.top_k, most)
    least = lowest_logp(record.min_prob)
    return PrunedShape(
        *size,
        device,
        score=lambda pool, start: pool.joint_logp[:, start:],
        min_score=least,
        min_level_prob=record.min_level_prob,
    )


def lowest_logp(min_prob: float) -> float:
    """The lowest float32 that reaches the threshold; finite, so that empty slots never do."""
    return floor_float32(math.log(min_prob)) if min_prob > 0 else -MAX_FLOAT32


THRESHOLD = ShapeFamily(
    record=JointThreshold,
    rule=joint_threshold_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=False,
    is_ranked=always,
    kernel="pruned",
    withholds=prunes,
    words={"threshold": {}},
    grids={
        "threshold": grid(
            depth="2 4 8",
            top_k="4 10",
            min_prob="0.02 0.05 0.08 0.12 0.2 0.35",
            min_level_prob="0 0.3 0.5 0.7",
        )
    },
    shared_grid=grid(depth="5 8", top_k="4 8", min_prob="0.01 0.05"),
    chain=lambda record: record.model_copy(update={"top_k": 1}),
)
