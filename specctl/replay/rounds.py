"""The rounds that a policy would run over a log: decide everywhere, then walk each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions, join_positions, join_rows
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import Policy, build_shape
from specctl.replay.outcomes import (
    Outcomes,
    check_replayable,
    is_online,
    is_ranked,
    needs_entropy,
    online_bounds,
    outcomes_of,
    text_columns,
    walk_online,
)
from specctl.replay.walk import fewest, most, walk


@dataclass(frozen=True)
class RequestBounds:
    """Least and most of a request's totals, `[Q]` float64, whatever the log did not tell."""

    calls_low: Floats
    calls_high: Floats
    verified_low: Floats
    verified_high: Floats


@dataclass(frozen=True)
class Rounds:
    """M rounds of one policy over Q requests.

    Attributes:
        outcomes: one entry a round. request: `[M]` int64. context_tokens: `[M]` int32.
        emitted: `[M]` int32, tokens, bonus included, cut at the end of the response.
        is_last: `[M]` bool, the response ends in this round, so its path may be cut short.
        prompt, category: `[Q]` int32 codes. num_tokens: `[Q]` int64 that rounds emit, so without
            the one that reading the prompt gives.
        bounds: of each request; None if they were not computed.
    """

    policy: Policy
    outcomes: Outcomes
    request: Longs
    context_tokens: Ints
    emitted: Ints
    is_last: Bools
    prompt: Ints
    prompt_ids: tuple[str, ...]
    category: Ints
    categories: tuple[str, ...]
    num_tokens: Longs
    bounds: RequestBounds | None


@dataclass(frozen=True)
class WalkedPart:
    """Some requests under one policy; only visited rows are kept, so memory follows the rounds.

    Attributes:
        visited: `[R]` bool, a round starts there. outcomes: of these rows.
    """

    positions: Positions
    visited: Bools
    outcomes: Outcomes
    bounds: RequestBounds | None


def replay(
    log: DenseLog,
    policies: Sequence[Policy],
    *,
    with_bounds: bool = True,
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
) -> list[Rounds]:
    """Runs every policy over every request of a log, in one pass over the files.

    Args:
        with_bounds: a third of the time where the log lacks something.
        num_threads: chunks decided at a time; results do not depend on it.
        on_positions: called with the positions of each finished chunk.

    Raises:
        UsageError: a policy that a log cannot tell. TraceError: see `DenseLog`.
    """
    for policy in policies:
        check_replayable(policy)

    def decide(chunk: LogChunk) -> list[WalkedPart]:
        return [_walked(policy, chunk, with_bounds=with_bounds) for policy in policies]

    chunks = log.each(
        decide,
        with_entropy=any(needs_entropy(policy) for policy in policies),
        extra=text_columns(policies),
        num_threads=num_threads,
        on_positions=on_positions,
    )
    by_policy = list(zip(*chunks, strict=True)) or [()] * len(policies)
    return [join_walked(p, parts) for p, parts in zip(policies, by_policy, strict=True)]


def _walked(policy: Policy, chunk: LogChunk, *, with_bounds: bool) -> WalkedPart:
    if not is_online(policy):
        outcomes = outcomes_of(policy, chunk)
        return walk_outcomes(policy, chunk.positions, outcomes, with_bounds=with_bounds)
    visited, outcomes = walk_online(policy, chunk)
    bounds = None
    if with_bounds:
        bounds = RequestBounds(*online_bounds(policy, chunk.positions, visited, outcomes))
    return WalkedPart(chunk.positions, visited, outcomes, bounds)


def walk_outcomes(
    policy: Policy, positions: Positions, outcomes: Outcomes, *, with_bounds: bool = True
) -> WalkedPart:
    """The rounds of a policy that was decided at every position."""
    visited = walk(positions, outcomes.accepted + 1)
    bounds = _bounds(policy, positions, outcomes, visited) if with_bounds else None
    return WalkedPart(positions, visited, outcomes.pick(visited), bounds)


def _bounds(
    policy: Policy, positions: Positions, outcomes: Outcomes, visited: Bools
) -> RequestBounds:
    first = positions.start[:-1]
    low, high = outcomes.low, outcomes.high
    is_certain = low is high or bool((low == high).all())
    fewest_calls = most_calls = np.add.reduceat(visited, first, dtype=np.float64)
    if not is_certain:
        ones = np.ones(positions.num_rows)
        fewest_calls = fewest(positions, ones, low + 1, high + 1)[first]
        most_calls = most(positions, ones, low + 1, high + 1)[first]

    def total(cost: Ints, bound: Callable[..., Floats], calls: Floats) -> Floats:
        """`[Q]` of a cost `[R]` a round: that of its calls, or by the walk where it is certain."""
        if (cost == cost[0]).all():
            return np.asarray(calls * cost[0], np.float64)
        if is_certain:
            return np.add.reduceat(np.where(visited, cost, 0), first).astype(np.float64)
        return bound(positions, cost.astype(np.float64), low + 1, high + 1)[first]

    at_least = at_most = outcomes.verified
    if (missing := outcomes.missing > 0).any():
        at_most = np.where(missing, build_shape(policy.shape).max_tokens, at_most)
        at_least = at_least if is_ranked(policy.shape) else np.where(missing, 1, at_least)
    return RequestBounds(
        fewest_calls,
        most_calls,
        total(at_least, fewest, fewest_calls),
        total(at_most, most, most_calls),
    )


def join_walked(policy: Policy, parts: Sequence[WalkedPart]) -> Rounds:
    """The rounds of all parts, in order."""
    positions = join_positions([part.positions for part in parts])
    visited = np.concatenate([part.visited for part in parts])
    outcomes = join_rows([part.outcomes for part in parts])
    remaining = positions.remaining[visited]
    bounds = [part.bounds for part in parts if part.bounds is not None]
    return Rounds(
        policy=policy,
        outcomes=outcomes,
        request=positions.request[visited],
        context_tokens=positions.context_tokens[visited],
        emitted=np.minimum(outcomes.accepted + 1, remaining).astype(np.int32),
        is_last=remaining <= outcomes.accepted + 1,
        prompt=positions.prompt,
        prompt_ids=positions.prompt_ids,
        category=positions.category,
        categories=positions.categories,
        num_tokens=positions.remaining[positions.start[:-1]].astype(np.int64),
        bounds=join_rows(bounds) if len(bounds) == len(parts) else None,
    )
