"""Shapes that learn as they go: each request's rounds in order, its memory carried as live.

What such a shape does at a position depends on the rounds before it, so the positions cannot be
decided all at once. The requests of a chunk step together instead, one round a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specctl.logs.logged_draft import LoggedDraft, logged_draft
from specctl.logs.positions import Bools, Floats, Longs, Positions
from specctl.logs.tree_log import LogChunk
from specctl.policy import Policy, build_shape
from specctl.policy.rules import RoundStart, ShapeRule
from specctl.policy.verification import Outcome
from specctl.replay.outcomes import (
    Outcomes,
    is_ranked,
    join_outcomes,
    outcomes_at,
    pick_outcomes,
)
from specctl.tree import take


@dataclass(frozen=True)
class Step:
    """One round of each request that has not ended.

    Attributes:
        rows: `[A]` int64 numpy, positions of the chunk where the rounds start.
        on_path: `[A, N]` bool, the submitted node was accepted.
        outcome: what the shape learns from. Token ids are not logged for replay and are 0.
    """

    rows: Longs
    draft: LoggedDraft
    on_path: Tensor
    outcome: Outcome


def is_online(policy: Policy) -> bool:
    """Whether a policy's shape learns from a request's earlier rounds."""
    return build_shape(policy.shape).memory_size > 0


def steps(rule: ShapeRule, chunk: LogChunk) -> Iterator[Step]:
    """The rounds of all requests of a chunk, side by side, first rounds first.

    Where the log lacks what a round asked for, the walk goes on with what it holds.
    """
    positions = chunk.positions
    here, end = positions.start[:-1].copy(), positions.start[1:]
    memory = torch.zeros(len(here), rule.memory_size, dtype=torch.float64)
    while len(here):
        rows = torch.from_numpy(here)
        draft = logged_draft(rule, chunk, rows, RoundStart(len(here), memory))
        on_path = draft.on_path
        outcome = outcome_of(draft, on_path)
        yield Step(here, draft, on_path, outcome)
        memory = rule.observe(memory, outcome)
        here = here + on_path.sum(1).numpy()
        inside = here < end
        here, end, memory = here[inside], end[inside], memory[torch.from_numpy(inside)]


def outcome_of(draft: LoggedDraft, on_path: Tensor) -> Outcome:
    """What the rules would be shown of a logged round. `on_path`: `[B, N]` bool."""
    tree = take(draft.pool.tree, draft.submitted)
    deepest = int(tree.depth.max())
    place = tree.depth.masked_fill(~on_path, deepest + 1)
    slots = torch.arange(tree.num_slots).expand_as(place)
    path = torch.full((len(place), deepest + 2), -1).scatter(1, place, slots)
    nothing = torch.zeros_like(tree.token_ids)
    return Outcome(draft.pool, draft.submitted, tree, path[:, : deepest + 1], nothing)


@dataclass(frozen=True)
class OnlineWalk:
    """The rounds of a chunk.

    Attributes:
        visited: `[R]` bool, a round starts there. outcomes: of the visited rows, in their order.
    """

    visited: Bools
    outcomes: Outcomes


@torch.inference_mode()
def walk_online(policy: Policy, chunk: LogChunk) -> OnlineWalk:
    """Runs a shape over every request of a chunk."""
    rule, by_rank = build_shape(policy.shape), is_ranked(policy.shape)
    found, rows = [], []
    for step in steps(rule, chunk):
        found.append(outcomes_at(step.draft, step.on_path, chunk, step.rows, by_rank=by_rank))
        rows.append(step.rows)
    order = np.concatenate(rows)
    visited = np.zeros(chunk.positions.num_rows, np.bool_)
    visited[order] = True
    return OnlineWalk(visited, pick_outcomes(join_outcomes(found), order.argsort()))


def online_bounds(
    policy: Policy, positions: Positions, walk: OnlineWalk
) -> tuple[Floats, Floats, Floats, Floats]:
    """Least and most calls, least and most verified tokens of each request, `[Q]` float64.

    Exact up to the first round whose end the log does not tell. What comes later depends on what
    the shape would have learnt there, so all that is used is that a round emits between one token
    and a whole path, and verifies at least what it emits.
    """
    outcomes, rule = walk.outcomes, build_shape(policy.shape)
    request, remaining = positions.request[walk.visited], positions.remaining[walk.visited]
    unsure = outcomes.open > 0 if is_ranked(policy.shape) else outcomes.missing > 0
    before = _unsure_before(request, unsure)
    sure, first = (before == 0) & ~unsure, (before == 0) & unsure
    most = np.where(outcomes.missing > 0, rule.max_tokens, outcomes.verified)

    def totals(of_sure: Floats, of_first: Floats) -> Floats:
        values = np.where(sure, of_sure, np.where(first, of_first, 0.0))
        return np.bincount(request, values, positions.num_requests)

    one, left = np.ones(len(request)), remaining.astype(np.float64)
    return (
        totals(one, np.ceil(left / (rule.max_depth + 1))),
        totals(one, left),
        totals(outcomes.verified.astype(np.float64), left),
        totals(most.astype(np.float64), left * rule.max_tokens),
    )


def _unsure_before(request: Longs, unsure: Bools) -> Longs:
    """`[M]` unsure rounds of the same request before each round."""
    before = np.cumsum(unsure) - unsure
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    sizes = np.diff(np.append(starts, len(request)))
    found: Longs = before - np.repeat(before[starts], sizes)
    return found
