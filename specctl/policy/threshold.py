"""The joint-probability threshold: the plainest tree that adapts."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.lazy import torch
from specctl.policy.family import MAX_TOKENS, Depth, Family, NumTokens, Shape, TopK, grid
from specctl.policy.pruning import PrunedShape
from specctl.records import MAX_FLOAT32, floor_float32, require


class JointThreshold(Shape):
    """Every node whose path is likely enough, and none else: a tree without a fixed size.

    A node is expanded and submitted iff its joint probability is at least `min_prob`. One
    threshold over all rounds spends nodes where the drafter is sure; any learned pruning has to
    beat it at the same depth (notes/pair.md, 4a).

    Attributes:
        depth: drafted levels at most.
        top_k: children per expanded node and nodes expanded per level.
        min_prob: of the whole path.
        num_tokens: cap on submitted nodes, root counted; none leaves it to `min_prob`.
    """

    always_reads: ClassVar = ("joint_prob",)
    kind: Literal["threshold"] = "threshold"
    depth: Depth = 8
    top_k: TopK = 10
    min_prob: Annotated[float, Field(ge=0, lt=1)] = 0.05
    num_tokens: NumTokens | None = None

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
        *size, device, score=lambda pool, start: pool.joint_logp[:, start:], min_score=least
    )


def lowest_logp(min_prob: float) -> float:
    """The least float32 that reaches the threshold; finite, so that empty slots never do."""
    return floor_float32(math.log(min_prob)) if min_prob > 0 else -MAX_FLOAT32


THRESHOLD = Family(
    record=JointThreshold,
    rule=joint_threshold_shape,
    words={"threshold": {}},
    grids={
        "threshold": grid(
            depth="2 4 6 8 10",
            top_k="4 8 10",
            min_prob="0.01 0.02 0.03 0.05 0.08 0.12 0.2 0.3 0.4 0.6",
        )
    },
    shared_grid=grid(depth="5 8", top_k="4 8", min_prob="0.01 0.05"),
)
