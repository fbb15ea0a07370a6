"""Trees pruned by a score while they grow: what no score reaches is neither expanded nor verified.

Which score is the family's own: the joint probability (`threshold`, the plainest tree that adapts),
or what a classifier says of a node (`c2t`). Growing, closing and capping are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from specctl.lazy import Tensor, torch
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
"""`(pool, start) -> [B, P - start]` float32, more is better, -inf in empty slots: scores of the
pool's nodes from index `start` on, which are one level or more."""
Combine = Callable[[Tensor, Tensor], Tensor]
"""`(of the parent, own) -> combined`, shapes `[B, W, 1]` and `[B, W, K]`: a node's score behind
its parent's. A result that is never above the parent's keeps a capped tree closed."""


@dataclass
class PrunedPlan(Plan):
    """Also remembers the scores of what was drafted so far."""

    levels: list[Tensor] = field(default_factory=list)
    """`[B, C]` float32 of each level, combined along the path; -inf in empty slots, and inf at the
    root, which is always submitted."""
    of_frontier: Tensor = field(default_factory=lambda: torch.empty(0))
    """`[B, W]` float32, scores of the nodes whose children come next."""
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    """`[B, P']` of all that was scored; empty before `select`."""
    num_scored: int = 1


@dataclass(kw_only=True)
class PrunedShape(BaseShape):
    """Expands the best `width` nodes of a level among those that reach `min_score`.

    A round scores once a level, so on a CPU it costs its number of operations: scores are
    kept by level, and a child's parent is known by its place, W-major below the last frontier.
    """

    score: Score  # of nodes as they are drafted, natural log of their acceptance
    min_score: float  # below it a node is neither expanded nor submitted
    combine: Combine | None = None
    """With the parent's; None leaves a node its own, for scores that cannot rise along a path or
    need no closing."""
    root_score: float = float("inf")  # what `combine` gets for the parent of the first level
    min_level_prob: float = 0.0  # of a level's nodes together, below which none is expanded

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
        """`[B, C]` combined scores of the level that starts there; -inf in empty slots.

        Args:
            of_parent: `[B, W]`, of the frontier that the level's nodes are children of.
        """
        own = self.score(pool, start)
        if self.combine is None:
            return own
        return self.combine(of_parent[..., None], own.view(*of_parent.shape, -1)).flatten(1)

    def _score_new(self, plan: PrunedPlan, pool: DraftPool) -> None:
        """Scores the level that was drafted since the last call, if there is one."""
        start, size = plan.num_scored, pool.joint_logp.shape[1]
        if start < size:
            width = (size - start) // self.top_k  # of the frontier as far as it was expanded
            plan.levels.append(self.level_scores(plan.of_frontier[:, :width], pool, start))
            plan.num_scored = size


def best_scores(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best of each row, best first, and where they stand; as `top_order`."""
    if scores.numel() < SORTED_WHOLE:
        values, order = scores.sort(dim=1, descending=True, stable=True)
        return values[:, :width], order[:, :width]
    order = top_order(scores, width)
    return scores.gather(1, order), order


def indices_of(kept: Tensor) -> Tensor:
    """`[B, P]` int64: where `kept` `[B, P]` is true, ascending, -1 padded."""
    kept, order = kept.sort(dim=1, descending=True, stable=True)
    return order.masked_fill_(~kept, -1)


# --------------------------------------------------------------------------- joint probability


class JointThreshold(Shape):
    """Every node whose path is likely enough, and none else: a tree without a fixed size.

    A node is expanded and submitted iff its joint probability is at least `min_prob`. One
    threshold over all rounds spends nodes where the drafter is sure; any learned pruning has to
    beat it at the same depth.

    With `min_level_prob` it is the marginal rule. At a rate of λ tokens per us a node is worth its
    time iff its acceptance is at least λ · (us to verify one token more), and a level iff what it
    adds is at least λ · (us to draft it); what it adds grows with the probability that the text
    goes through one of the nodes that are expanded, which is the sum of theirs, as at most one of
    a level is on the path.
    """

    always_reads: ClassVar = ("joint_prob",)
    kind: Literal["threshold"] = "threshold"
    depth: Depth = 8  # drafted levels at most
    top_k: TopK = 10  # children per expanded node and nodes expanded per level
    min_prob: Annotated[float, Field(ge=0, lt=1)] = 0.05  # of the whole path
    num_tokens: NumTokens | None = None
    """Cap on submitted nodes, root counted; none leaves it to `min_prob`."""
    min_level_prob: Probability = 0.0
    """Of all nodes together that would be expanded, below which drafting stops."""

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
        # A little more than 1, because probabilities are rounded.
        likely = math.floor(1.001 / self.min_prob) if self.min_prob else MAX_TOKENS**2
        deeper = min(self.top_k**2, likely)
        return 1 + min(self.top_k, likely) + (self.depth - 1) * deeper


def joint_threshold_shape(record: JointThreshold, device: torch.device) -> PrunedShape:
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
    """The least float32 that reaches the threshold; finite, so that empty slots never do."""
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
