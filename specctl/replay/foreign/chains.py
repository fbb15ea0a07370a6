"""Chains over imported acceptance: fixed length, and the oracle that drafts what is accepted.

A chain of K tokens accepts min(K, a) where the log accepted a, exactly, as long as K is within
what the log offered; beyond it the rounds that the log cut short are censored and bounded.
SpecDecode-Bench calls these FIXED_K and ORACLE (`predictor.py`; paper 2601.11580).
"""

from __future__ import annotations

import numpy as np

from specctl.errors import UsageError
from specctl.logs.positions import Bools, Floats, Ints, Positions
from specctl.policy import Policy
from specctl.policy.records import MAX_DEPTH, Chain, RootOnly
from specctl.replay.foreign.traces import ImportedTraces, censored
from specctl.replay.outcomes import Outcomes
from specctl.replay.rounds import Bounds, Rounds
from specctl.replay.walk import fewest, most, walk


def replay_chain(traces: ImportedTraces, drafter: str, num_draft_tokens: int) -> Rounds:
    """Every round of a chain of fixed length; `score` turns them into figures.

    Every round verifies `num_draft_tokens` + 1 tokens, as engines submit them, also where fewer
    tokens remain. A drafter that at times proposes nothing (an n-gram without a match) verifies
    less in life; the log does not say where.

    Args:
        num_draft_tokens: K; 0 is plain decoding.

    Raises:
        UsageError: K below 0 or above `MAX_DEPTH`, or a drafter that was not imported.
    """
    shape = _shape(num_draft_tokens)
    depth = traces.offered_depth(drafter)
    logged = traces.accepted_by(drafter)
    accepted = np.minimum(logged, num_draft_tokens)
    is_open = traces.censored(drafter) & (num_draft_tokens > depth)
    high = np.where(is_open, np.minimum(num_draft_tokens, traces.positions.remaining), accepted)
    visited = walk(traces.positions, accepted + 1)
    bounds = _bounds(traces.positions, accepted, high.astype(np.int32), visited, num_draft_tokens)
    drafted = np.full(int(visited.sum()), num_draft_tokens, np.int32)
    missing = np.where(is_open[visited], num_draft_tokens - depth, 0)
    outcomes = _outcomes(accepted[visited], high[visited], drafted, missing)
    return _rounds(Policy(shape=shape), traces.positions, visited, outcomes, bounds)


def replay_oracle(traces: ImportedTraces, drafter: str) -> Rounds:
    """Every round of the chain that drafts exactly what will be accepted.

    As many calls as the deepest logged chain, and no draft token rejected. It never drafts past
    what the log offered; rounds cut there are counted as censored. Its `policy` is the chain of
    the logged depth (up to `MAX_DEPTH`), whose rounds these are; it drafts and verifies less.
    """
    depth = traces.offered_depth(drafter)
    accepted = traces.accepted_by(drafter)
    visited = walk(traces.positions, accepted + 1)
    drafted = accepted[visited]
    is_open = censored(drafted, traces.positions.remaining[visited], depth)
    outcomes = _outcomes(drafted, drafted, drafted, is_open.astype(np.int64))
    calls = np.add.reduceat(visited, traces.positions.start[:-1], dtype=np.float64)
    tokens = np.add.reduceat(
        np.where(visited, accepted + 1, 0), traces.positions.start[:-1], dtype=np.float64
    )
    bounds = Bounds(calls, calls, tokens, tokens)
    shape = _shape(min(depth, MAX_DEPTH))
    return _rounds(Policy(shape=shape), traces.positions, visited, outcomes, bounds)


def _shape(num_draft_tokens: int) -> Chain | RootOnly:
    if not 0 <= num_draft_tokens <= MAX_DEPTH:
        raise UsageError(
            "chain over imported traces",
            expected=f"0 to {MAX_DEPTH} draft tokens",
            found=str(num_draft_tokens),
            fix="0 is plain decoding",
        )
    return Chain(num_draft_tokens=num_draft_tokens) if num_draft_tokens else RootOnly()


def _outcomes(accepted: Ints, high: Ints, drafted: Ints, missing: Ints) -> Outcomes:
    """Of the visited positions. In a chain the deepest accepted token's rank is its depth.

    An accepted length tells how a longer chain would have fared wherever it ended early, so an
    expansion is missing only at the censored rounds.
    """
    values = {
        "accepted": accepted,
        "low": accepted,
        "high": high,
        "verified": drafted + 1,
        "drafted": drafted,
        "levels": drafted,
        "expanded": np.maximum(drafted - 1, 0),
        "tcr": accepted,
        "asked": np.maximum(drafted, missing),
        "missing": missing,
        "open": missing > 0,
        "bins": np.full(len(accepted), -1),
    }
    return Outcomes(**{name: column.astype(np.int32) for name, column in values.items()})


def _bounds(
    positions: Positions, accepted: Ints, high: Ints, visited: Bools, num_draft_tokens: int
) -> Bounds:
    """Least and most calls of each request, whatever the censored rounds would have accepted."""
    first = positions.start[:-1]
    low_calls = high_calls = np.add.reduceat(visited, first, dtype=np.float64)
    if (high > accepted).any():
        ones: Floats = np.ones(positions.num_rows)
        low_calls = fewest(positions, ones, accepted + 1, high + 1)[first]
        high_calls = most(positions, ones, accepted + 1, high + 1)[first]
    size = num_draft_tokens + 1
    return Bounds(low_calls, high_calls, size * low_calls, size * high_calls)


def _rounds(
    policy: Policy, positions: Positions, visited: Bools, outcomes: Outcomes, bounds: Bounds
) -> Rounds:
    remaining = positions.remaining[visited]
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
        bounds=bounds,
    )
