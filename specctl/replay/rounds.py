"""The rounds that a policy would run over a log: decide everywhere, then walk each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specctl.logs.positions import Floats, Ints, Longs, Positions, join_positions
from specctl.logs.tree_log import DenseLog, LogChunk, Support
from specctl.policy import Policy
from specctl.policy.build import build_shape
from specctl.replay.online import is_online, online_bounds, walk_online
from specctl.replay.outcomes import (
    Outcomes,
    check_replayable,
    is_ranked,
    join_outcomes,
    needs_entropy,
    outcomes_of,
    pick_outcomes,
    text_columns,
)
from specctl.replay.walk import fewest, most, walk


@dataclass(frozen=True)
class Bounds:
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
        bounds: of each request; None if they were not asked for.
    """

    policy: Policy
    outcomes: Outcomes
    request: Longs
    context_tokens: Ints
    emitted: Ints
    is_last: Any
    prompt: Ints
    prompt_ids: tuple[str, ...]
    category: Ints
    categories: tuple[str, ...]
    num_tokens: Longs
    bounds: Bounds | None


@dataclass
class _Part:
    """What one chunk adds to a policy's rounds."""

    positions: Positions
    outcomes: Outcomes
    visited: Any
    bounds: Bounds | None


@dataclass
class _Parts:
    of_chunk: list[_Part] = field(default_factory=list)


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
    chunks = log.chunks(
        with_entropy=any(needs_entropy(policy) for policy in policies),
        extra=text_columns(policies),
    )
    found: list[_Parts] = [_Parts() for _ in policies]

    def decide(chunk: LogChunk) -> list[_Part]:
        return [_part_of(policy, chunk, log.support, with_bounds) for policy in policies]

    for parts in map_ordered(decide, chunks, num_threads):
        for into, part in zip(found, parts, strict=True):
            into.of_chunk.append(part)
        if on_positions is not None:
            on_positions(len(parts[0].visited))
    return [_joined(p, f.of_chunk) for p, f in zip(policies, found, strict=True)]


def map_ordered(
    work: Callable[[Any], Any], items: Iterable[Any], num_threads: int
) -> Iterable[Any]:
    """`map` over threads, in order, holding no more than `num_threads + 1` items at a time.

    Tensor operations release the interpreter lock, so threads do share the work.
    """
    if num_threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        running: list[Any] = []
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > num_threads:
                yield running.pop(0).result()
        for future in running:
            yield future.result()


def _part_of(policy: Policy, chunk: LogChunk, support: Support, with_bounds: Any) -> _Part:
    """A chunk under one policy. Only the visited rows are kept: memory follows the rounds."""
    if is_online(policy):
        done = walk_online(policy, chunk)
        limits = Bounds(*online_bounds(policy, chunk.positions, done)) if with_bounds else None
        return _Part(chunk.positions, done.outcomes, done.visited, limits)
    positions, outcomes = chunk.positions, outcomes_of(policy, chunk)
    visited = walk(positions, outcomes.accepted + 1)
    bounds = _bounds(policy, positions, outcomes, visited) if with_bounds else None
    return _Part(positions, pick_outcomes(outcomes, visited), visited, bounds)


def _bounds(policy: Policy, positions: Positions, outcomes: Outcomes, visited: Any) -> Bounds:
    first = positions.start[:-1]
    if not outcomes.missing.any():
        totals = np.add.reduceat(visited, first, dtype=np.float64)
        verified = np.add.reduceat(np.where(visited, outcomes.verified, 0), first)
        return Bounds(totals, totals, verified.astype(float), verified.astype(float))
    low, high = outcomes.low + 1, outcomes.high + 1
    ones = np.ones(positions.num_rows)
    limit = build_shape(policy.shape).max_tokens
    at_most = np.where(outcomes.missing > 0, limit, outcomes.verified).astype(float)
    floor = outcomes.verified if is_ranked(policy.shape) else 1
    at_least = np.where(outcomes.missing > 0, floor, outcomes.verified).astype(float)
    return Bounds(
        fewest(positions, ones, low, high)[first],
        most(positions, ones, low, high)[first],
        fewest(positions, at_least, low, high)[first],
        most(positions, at_most, low, high)[first],
    )


def _joined(policy: Policy, parts: list[_Part]) -> Rounds:
    positions = join_positions([part.positions for part in parts])
    visited = np.concatenate([part.visited for part in parts])
    outcomes = join_outcomes([part.outcomes for part in parts])
    remaining = positions.remaining[visited]
    emitted = np.minimum(outcomes.accepted + 1, remaining)
    bounds = [part.bounds for part in parts if part.bounds is not None]
    return Rounds(
        policy=policy,
        outcomes=outcomes,
        request=positions.request[visited],
        context_tokens=positions.context_tokens[visited],
        emitted=emitted.astype(np.int32),
        is_last=remaining <= outcomes.accepted + 1,
        prompt=positions.prompt,
        prompt_ids=positions.prompt_ids,
        category=positions.category,
        categories=positions.categories,
        num_tokens=positions.remaining[positions.start[:-1]].astype(np.int64),
        bounds=_joined_bounds(bounds) if len(bounds) == len(parts) else None,
    )


def _joined_bounds(parts: Sequence[Bounds]) -> Bounds:
    names = ("calls_low", "calls_high", "verified_low", "verified_high")
    return Bounds(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
