"""Batches by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specctl.logs.positions import Positions
from specctl.policy import Policy, StaticTree
from specctl.replay.batch_simulation import Load, Seed
from specctl.replay.cost.rates import LinearCost
from specctl.replay.outcomes import Outcomes
from specctl.replay.submissions import Submissions
from tests.replay.costs import linear_cost

TREE = StaticTree(depth=3, top_k=3, num_tokens=8)


@dataclass(frozen=True)
class TimedLoad(Load):
    """Requests that arrive at stated times."""

    arrivals_us: tuple[float, ...] = ()

    def draw(self, num_logged: int, seed: Seed) -> tuple[Any, Any]:
        named = replace(self, num_requests=len(self.arrivals_us))
        return super(TimedLoad, named).draw(num_logged, seed)[0], np.array(self.arrivals_us)


def positions_of(lengths: list[int], prompt_tokens: Sequence[int] | None = None) -> Positions:
    """Requests of so many positions, behind prompts of some length; 1, 2, ... tokens if unsaid."""
    sizes, codes = np.array(lengths), np.arange(len(lengths), dtype=np.int32)
    before = 1 + codes if prompt_tokens is None else np.array(prompt_tokens)
    place = np.concatenate([np.arange(1, size + 1) for size in sizes])
    return Positions(
        start=np.append(0, np.cumsum(sizes)),
        prompt=codes,
        prompt_ids=tuple(f"p{code}" for code in codes),
        category=0 * codes,
        categories=("",),
        remaining=(np.repeat(sizes, sizes) + 1 - place).astype(np.int32),
        context_tokens=(np.repeat(before, sizes) + place).astype(np.int32),
    )


def linear(**rates: float) -> LinearCost:
    """A step of n tokens takes 100 + 10 n us and so does a prompt, unless told otherwise."""
    return linear_cost(
        **{"verify_fixed_us": 50.0, "verify_token_us": 10.0, "step_us": 50.0, **rates}
    )


def by_hand(*requests: tuple[int, Sequence[tuple[int, int]]]) -> Submissions:
    """Of each request the prompt's length, then (accepted, verified) at every position."""
    lengths = [len(rows) for _, rows in requests]
    positions = positions_of(lengths, [prompt for prompt, _ in requests])
    accepted, verified = np.array([row for _, rows in requests for row in rows], np.int32).T
    accepted = np.minimum(accepted, positions.remaining)
    outcomes = Outcomes.of(accepted, verified=verified, levels=3, wanted=7)
    return Submissions(Policy(shape=TREE), positions, outcomes, max_tokens=8)
