"""The rounds that a policy would run over a log: decide everywhere, then walk each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from specctl.errors import TraceMismatchError
from specctl.logs.logged_draft import logged_drafts
from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions, join_rows
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy import Policy, at_batch_size, build_shape
from specctl.policy.families import shape_family
from specctl.replay.facts import MARKED_BELOW
from specctl.replay.outcomes import (
    Outcomes,
    accepted_bounds,
    check_replayable,
    map_policies,
    outcomes_at,
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
    """M rounds of one policy over Q requests."""

    policy: Policy | None  # None of rounds that no policy decides
    positions: Positions
    visited: Bools  # `[R]` bool, a round starts at the position
    outcomes: Outcomes  # of these M rows, in order, so memory follows the rounds
    bounds: RequestBounds | None = None  # of each request; None if they were not computed
    # that a round of the policy verifies at most, root counted; None: unknown
    max_tokens: int | None = None

    @cached_property
    def request(self) -> Longs:
        """`[M]` request of each round."""
        return self.positions.request[self.visited]

    @cached_property
    def context_tokens(self) -> Ints:
        """`[M]` text length up to and with the root."""
        return self.positions.context_tokens[self.visited]

    @cached_property
    def remaining(self) -> Ints:
        """`[M]` tokens of the response from the round on."""
        return self.positions.remaining[self.visited]

    @cached_property
    def emitted(self) -> Ints:
        """`[M]` tokens, bonus included, cut at the end of the response."""
        return np.minimum(self.outcomes.accepted + 1, self.remaining)

    @property
    def is_last(self) -> Bools:
        """`[M]`: the response ends in this round, so its path may be cut short."""
        return self.remaining <= self.outcomes.accepted + 1


Clock = Callable[[Rounds], Floats]
"""Machine time of every round, `[M]` us, e.g. a `LoadClock`."""


def replay(log: DenseLog, policies: Sequence[Policy], *, with_bounds: bool = True) -> list[Rounds]:
    """Runs every policy over every request of a log, in one pass over the files.

    Args:
        with_bounds: a third of the time where the log lacks something.

    Raises:
        UsageError: a policy that a log cannot tell. TraceError: see `DenseLog`.
    """
    for policy in policies:
        check_replayable(policy)
    parts = map_policies(log, policies, partial(replay_chunk, with_bounds=with_bounds))
    return [join_rows(of) for of in zip(*parts, strict=True)]


def check_held(log: DenseLog, policy: Policy, support: float, what: str) -> None:
    """Refuses figures of a policy of which a log lacks what `replay` would give as a range.

    Args:
        support: the share of the wanted expansions or of the rounds, the lesser, that it holds.
        what: what is scored, as it was named.

    Raises:
        TraceMismatchError: with the share that is missing, and the trees that hold it.
    """
    if support >= MARKED_BELOW:
        return
    rule, held = build_shape(policy.shape), log.support
    wanted = {
        "--depth": (rule.max_depth, held.depth),
        "--children": (rule.top_k, held.top_k),
        "--width": (rule.width, held.width),
    }
    lacking = [f"{name} {most}" for name, (most, here) in wanted.items() if most > here]
    raise TraceMismatchError(
        f"{what}: the log holds {support:.1%} of the expansions and rounds that it wants, so that "
        f"{1 - support:.1%} are missing, in trees of --depth {held.depth} --children {held.top_k}",
        hint=f"collect with --dense {' '.join(lacking) or 'and a larger --width'}",
    )


def replay_chunk(policy: Policy, chunk: LogChunk, *, with_bounds: bool = True) -> Rounds:
    """The rounds of a policy over the requests of a chunk, each a batch by itself."""
    policy = policy.model_copy(update={"shape": at_batch_size(policy.shape, 1)})
    rule, positions = build_shape(policy.shape), chunk.positions
    if rule.memory_size:
        visited, outcomes = walk_online(rule, chunk)
        bounds = _online_bounds(policy, positions, visited, outcomes) if with_bounds else None
        return Rounds(policy, positions, visited, outcomes, bounds, rule.max_tokens)
    parts, spans, by_rank = [], [], shape_family(policy.shape).is_ranked(policy.shape)
    for draft in logged_drafts(rule, chunk):
        parts.append(outcomes_at(draft))
        if with_bounds:
            spans.append(accepted_bounds(draft, by_rank=by_rank))
    outcomes = join_rows(parts)
    run = walk_outcomes(policy, positions, outcomes, rule.max_tokens)
    if not with_bounds:
        return run
    low, high = np.concatenate(spans, 1)
    of = (policy, positions, run.visited, outcomes, low, high, rule.max_tokens)
    return replace(run, bounds=_walk_bounds(*of))


def walk_outcomes(
    policy: Policy | None, positions: Positions, outcomes: Outcomes, max_tokens: int | None = None
) -> Rounds:
    """The rounds of what was decided at every position.

    Args:
        max_tokens: that a round verifies at most.
    """
    visited = walk(positions, outcomes.accepted + 1)
    return Rounds(policy, positions, visited, outcomes.at(visited), max_tokens=max_tokens)


def _walk_bounds(
    policy: Policy,
    positions: Positions,
    visited: Bools,
    outcomes: Outcomes,
    low: Ints,
    high: Ints,
    max_tokens: int,
) -> RequestBounds:
    first = positions.start[:-1]
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
        at_most = np.where(missing, max_tokens, at_most)
        at_least = (
            at_least
            if shape_family(policy.shape).is_ranked(policy.shape)
            else np.where(missing, 1, at_least)
        )
    return RequestBounds(
        fewest_calls,
        most_calls,
        total(at_least, fewest, fewest_calls),
        total(at_most, most, most_calls),
    )


def _online_bounds(
    policy: Policy, positions: Positions, visited: Bools, outcomes: Outcomes
) -> RequestBounds:
    """Bounds of a shape that learns, whose rounds `visited` and `outcomes` are.

    Exact up to the first round whose end the log does not tell. What comes later depends on what
    the shape would have learnt there, so all that is used is that a round emits between one token
    and a whole path, and verifies at least what it emits.
    """
    rule = build_shape(policy.shape)
    request, left = positions.request[visited], positions.remaining[visited].astype(np.float64)
    unsure = (
        outcomes.censored > 0
        if shape_family(policy.shape).is_ranked(policy.shape)
        else outcomes.missing > 0
    )
    # Unsure rounds of the same request before each round.
    earlier: Longs = np.cumsum(unsure) - unsure
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    before = earlier - np.repeat(earlier[starts], np.diff(np.append(starts, len(request))))
    sure, first = (before == 0) & ~unsure, (before == 0) & unsure
    most_verified = np.where(outcomes.missing > 0, rule.max_tokens, outcomes.verified)

    def totals(of_sure: Floats | Ints, of_first: Floats) -> Floats:
        values = np.where(sure, of_sure, np.where(first, of_first, 0.0))
        return np.bincount(request, values, positions.num_requests).astype(np.float64)

    one = np.ones(len(request))
    return RequestBounds(
        totals(one, np.ceil(left / (rule.max_depth + 1))),
        totals(one, left),
        totals(outcomes.verified, left),
        totals(most_verified, left * rule.max_tokens),
    )
