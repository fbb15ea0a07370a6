"""The rounds of a policy over a log: outcomes at every position, then a walk of each request.

All requests walk together, so a walk takes as many array operations as the longest request has
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from pydantic import ValidationError

from specctl.errors import TraceMismatchError
from specctl.logs.logged_draft import logged_drafts
from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions, join_rows
from specctl.logs.tree_log import DenseLog, LogChunk, Support
from specctl.policy import Policy, Shape, at_batch_size, build_shape
from specctl.policy.families import shape_family
from specctl.replay.facts import MARKED_BELOW
from specctl.replay.outcomes import (
    Outcomes,
    accepted_bounds,
    at_text_end,
    check_replayable,
    map_policies,
    outcomes_at,
    walk_online,
)
from specctl.runtime.words import words_of


@dataclass(frozen=True)
class RequestBounds:
    """Least and most of a request's totals, `[Q]` float64, over all contents of missing
    expansions."""

    calls_low: Floats
    calls_high: Floats
    verified_low: Floats
    verified_high: Floats
    # of the accepted tokens and the bonus, those past the text's end
    past_end_low: Floats
    past_end_high: Floats


@dataclass(frozen=True)
class Rounds:
    """M rounds of one policy over Q requests."""

    policy: Policy | None  # None for limits of the ladder
    positions: Positions
    visited: Bools  # `[R]` bool, a round starts at the position
    outcomes: Outcomes  # of these M rows, in order
    bounds: RequestBounds | None = None  # None if they were not computed
    max_tokens: int | None = None  # of a round at most, root counted; None if unknown

    @cached_property
    def request(self) -> Longs:
        """`[M]` request of each round."""
        return self.positions.request[self.visited]

    @cached_property
    def context_tokens(self) -> Ints:
        """`[M]` text length, root included."""
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
        with_bounds: compute bounds too, which takes half as long again if expansions are missing.

    Raises:
        UsageError: a policy that cannot be replayed. TraceError: see `DenseLog`.
    """
    for policy in policies:
        check_replayable(policy)
    parts = map_policies(log, policies, partial(replay_chunk, with_bounds=with_bounds))
    return [join_rows(of) for of in zip(*parts, strict=True)]


def check_held(log: DenseLog, policy: Policy, support: float, what: str) -> None:
    """Refuses a policy whose figures `replay` would give as ranges.

    Args:
        support: the share of the wanted expansions or of the rounds, the lesser, in the log.
        what: name of the policy.

    Raises:
        TraceMismatchError: with the missing share and the size of sufficient trees.
    """
    if support >= MARKED_BELOW:
        return
    held = log.support
    raise TraceMismatchError(
        f"{what}: the log holds {support:.1%} of the expansions and rounds that it wants, so that "
        f"{1 - support:.1%} are missing, in trees of --depth {held.depth} --children {held.top_k}",
        hint=held_with(policy, held) or "collect with --dense and a larger --width",
    )


DEPTHS = ("depth", "window", "num_draft_tokens")
"""Settings of shapes that are their largest depth."""


def held_with(policy: Policy, held: Support) -> str | None:
    """The options of a collection that holds a policy's drafts, and the policy that this log holds;
    None if the log's trees are large enough."""
    lacking = _larger(policy.shape, held)
    if not lacking:
        return None
    how = f"collect with --dense {' '.join(lacking)}"
    shape = policy.shape
    most = dict.fromkeys(DEPTHS, held.depth) | {"top_k": held.top_k}
    smaller = {
        name: size for name, size in most.items() if (getattr(shape, name, None) or 0) > size
    }
    with suppress(ValidationError):  # settings that do not go together
        fits = type(shape).model_validate(shape.model_dump() | smaller)
        words = words_of(policy.model_copy(update={"shape": fits}))  # None: it was fitted
        if words and not _larger(fits, held):
            how += f", or take {words}"
    return how


def _larger(shape: Shape, held: Support) -> list[str]:
    """The options of a collection where a shape's drafts are larger than a log's."""
    rule = build_shape(shape)
    wanted = {
        "--depth": (rule.max_depth, held.depth),
        "--children": (rule.top_k, held.top_k),
        "--width": (rule.width, held.width),
    }
    return [f"{name} {most}" for name, (most, here) in wanted.items() if most > here]


def replay_chunk(policy: Policy, chunk: LogChunk, *, with_bounds: bool = True) -> Rounds:
    """The rounds of a policy over the requests of a chunk, one request a batch."""
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
    logged = join_rows(parts)
    outcomes = at_text_end(chunk, policy, positions, logged)
    run = walk_outcomes(policy, positions, outcomes, rule.max_tokens)
    if not with_bounds:
        return run
    low, high = np.concatenate(spans, 1)
    if chunk.text_end is not None:
        most = np.where(logged.missing > 0, rule.max_tokens, logged.verified)
        low, high = (
            at_text_end(
                chunk, policy, positions, replace(logged, accepted=of, verified=most)
            ).accepted
            for of in (low, high)
        )
    of = (policy, positions, run.visited, outcomes, low, high, rule.max_tokens)
    return replace(run, bounds=_walk_bounds(*of))


def walk_outcomes(
    policy: Policy | None, positions: Positions, outcomes: Outcomes, max_tokens: int | None = None
) -> Rounds:
    """The rounds that follow from outcomes at every position."""
    visited = walk(positions, outcomes.accepted + 1)
    return Rounds(policy, positions, visited, outcomes.at(visited), max_tokens=max_tokens)


# ------------------------------------------------------------------------- walks and bounds


def walk(positions: Positions, advance: Ints | Longs) -> Bools:
    """`[R]` bool, the positions where rounds start, from the tokens that a round emits there."""
    visited = np.zeros(positions.num_rows, np.bool_)
    here, end = positions.start[:-1].copy(), positions.start[1:]
    while len(here):
        visited[here] = True
        here = here + advance[here]
        inside = here < end
        here, end = here[inside], end[inside]
    return visited


def least_cost(positions: Positions, cost: Floats, low: Ints, high: Ints) -> tuple[Floats, Ints]:
    """Least total cost from every position to the end of its request.

    The dynamic programme F(t) = min over low(t) <= a <= high(t) of cost(t, a - low(t)) + F(t + a).
    It goes backwards over all requests at once, the k-th position from every end together.

    Args:
        cost: `[R, K]` of a round that emits low + k tokens; `[R, 1]` if their number is no matter.
        low, high: `[R]` tokens emitted, 1 <= low <= high.

    Returns:
        `[R]` float64 F, and `[R]` int32 tokens to emit there, the fewest among equals.
    """
    total, emitted = np.zeros(positions.num_rows), np.zeros(positions.num_rows, np.int32)
    last, lengths = positions.start[1:] - 1, np.diff(positions.start)
    for back in range(int(lengths.max(initial=0))):
        longer = lengths > back
        here, end = (last - back)[longer], (last + 1)[longer]
        best = np.full(len(here), np.inf)
        for more in range(int((high[here] - low[here]).max(initial=0)) + 1):
            reached = here + low[here] + more
            after = np.where(reached < end, total[np.minimum(reached, end - 1)], 0.0)
            found = cost[here, min(more, cost.shape[1] - 1)] + after
            found[low[here] + more > high[here]] = np.inf
            emitted[here[found < best]] = low[here[found < best]] + more
            best = np.minimum(best, found)
        total[here] = best
    return total, emitted


def _walk_bounds(
    policy: Policy,
    positions: Positions,
    visited: Bools,
    outcomes: Outcomes,
    low: Ints,
    high: Ints,
    max_tokens: int,
) -> RequestBounds:
    first, is_certain = positions.start[:-1], bool((low == high).all())

    def total(cost: Any, sign: int) -> Floats:
        """`[Q]` least (sign 1) or most (-1) sum over rounds of a cost `[R, K]`."""
        if is_certain:
            return np.add.reduceat(np.where(visited, cost[:, 0], 0.0), first)
        return sign * least_cost(positions, sign * cost, low + 1, high + 1)[0][first]

    at_least = at_most = outcomes.verified
    if (missing := outcomes.missing > 0).any():
        at_most = np.where(missing, max_tokens, at_most)
        if not shape_family(policy.shape).is_ranked(policy.shape):
            at_least = np.where(missing, 1, at_least)
    calls = np.ones((positions.num_rows, 1))
    emitted = low[:, None] + 1 + np.arange(int((high - low).max(initial=0)) + 1)
    past_end = np.maximum(emitted - positions.remaining[:, None], 0)
    return RequestBounds(
        total(calls, 1),
        total(calls, -1),
        total(at_least[:, None], 1),
        total(at_most[:, None], -1),
        total(past_end, 1),
        total(past_end, -1),
    )


def _online_bounds(
    policy: Policy, positions: Positions, visited: Bools, outcomes: Outcomes
) -> RequestBounds:
    """Bounds of a shape that learns, from its rounds.

    They are exact up to the first round with missing expansions. The later rounds depend on what
    the shape learns there; they emit between one token and a whole path, and verify at least the
    tokens that they emit.
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
    past_end = np.maximum(outcomes.accepted + 1 - left, 0)
    return RequestBounds(
        totals(one, np.ceil(left / (rule.max_depth + 1))),
        totals(one, left),
        totals(outcomes.verified, left),
        totals(most_verified, left * rule.max_tokens),
        totals(past_end, np.zeros(len(request))),
        totals(past_end, one),  # a round accepts no token past the end: the bonus alone
    )
