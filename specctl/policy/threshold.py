"""The joint-probability threshold: the plainest tree that adapts, and what a learned one has to
beat."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.base import MAX_FLOAT32, floor_float32
from specctl.policy.pruning import PrunedShape
from specctl.policy.records import JointThreshold


def joint_threshold_shape(record: JointThreshold, device: torch.device) -> PrunedShape:
    """The rule of a threshold on the path's probability, which never rises along a path."""
    return PrunedShape(
        max_depth=record.depth,
        top_k=record.top_k,
        width=record.top_k,
        max_tokens=min(record.num_tokens or record.most_tokens, record.most_tokens),
        device=device,
        score=joint_logp,
        min_score=lowest_logp(record.min_prob),
    )


def lowest_logp(min_prob: float) -> float:
    """The least float32 that reaches the threshold; finite, so that empty slots never do."""
    return floor_float32(math.log(min_prob)) if min_prob > 0 else -MAX_FLOAT32


def joint_logp(pool: DraftPool, start: int) -> Tensor:
    """`[B, P - start]` log-probability of the path, nats."""
    return pool.joint_logp[:, start:]
