"""Drafts that stop on what the drafter says of itself: chains by a signal, trees by their beam."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.base import ceil_float32, floor_float32
from specctl.policy.records import DynamicDepth, SignalStop
from specctl.policy.rules import (
    BaseShape,
    Frontier,
    Level,
    Plan,
    best_nodes,
    best_of_level,
    rows_below,
    stop_rows,
)

Uncertain = Callable[[DraftPool], Tensor]
"""`[B, P]` bool: the drafter is too unsure of this token to go on behind it."""


@dataclass(kw_only=True)
class SignalStopShape(BaseShape):
    """A chain that ends at the first uncertain token, or before it."""

    uncertain: Uncertain
    keep_last: bool

    def grow(self, plan: Plan, level: Level) -> Frontier:
        stop_rows(plan, level, self._ends(level.pool)[:, level.start])
        return rows_below(plan, level, best_of_level(level, self.width))

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        if not self.keep_last:
            kept = pool.joint_logp.masked_fill(self._ends(pool), float("-inf"))
            pool = replace(pool, joint_logp=kept)
        return best_nodes(pool, self.max_tokens)

    def _ends(self, pool: DraftPool) -> Tensor:
        """`[B, P]` bool: uncertain tokens; the root never, nor the first token if it must stay."""
        first_tested = 1 if self.keep_last else 2
        return self.uncertain(pool) & (pool.tree.depth >= first_tested)


def signal_stop_shape(record: SignalStop, device: torch.device) -> SignalStopShape:
    """The rule of a chain that stops on a signal."""
    return SignalStopShape(
        max_depth=record.window,
        top_k=1,
        width=1,
        max_tokens=record.window + 1,
        device=device,
        uncertain=uncertainty(record),
        keep_last=record.keep_last,
    )


def uncertainty(record: SignalStop) -> Uncertain:
    """The test of a record; its threshold is rounded so that float32 decides as float64 would."""
    below, above = ceil_float32(record.threshold), floor_float32(record.threshold)
    factor = record.entropy_factor
    tests: dict[str, Uncertain] = {
        "confidence": lambda pool: pool.tree.draft_logp.exp() < below,
        "survival": lambda pool: pool.joint_logp.exp() < below,
        "entropy": lambda pool: pool.entropy > above,
        "sqrt_entropy": lambda pool: root_of(pool.entropy) > above,
        "entropy_bound": lambda pool: 1 - root_of(factor * pool.entropy) < below,
    }
    return tests[record.signal]


def root_of(entropy: Tensor) -> Tensor:
    """Square root; rounding can leave the entropy of a certain token just below 0."""
    return entropy.clamp(min=0).sqrt()


@dataclass(kw_only=True)
class DynamicDepthShape(BaseShape):
    """EAGLE-2's tree, no deeper than where the beam lost too much of its probability."""

    check_levels: tuple[int, ...]
    min_beam_prob: float

    def grow(self, plan: Plan, level: Level) -> Frontier:
        beam = best_of_level(level, self.width)
        if level.depth in self.check_levels:
            joint_prob = level.pool.joint_logp.gather(1, beam).double().exp()
            stop_rows(plan, level, joint_prob.sum(1) < self.min_beam_prob)
        return rows_below(plan, level, beam)


def dynamic_depth_shape(record: DynamicDepth, device: torch.device) -> DynamicDepthShape:
    """The rule of DDD."""
    return DynamicDepthShape(
        max_depth=record.depth,
        top_k=record.top_k,
        width=record.top_k,
        max_tokens=record.num_tokens,
        device=device,
        check_levels=record.check_levels,
        min_beam_prob=math.exp(record.min_beam_logp),
    )
