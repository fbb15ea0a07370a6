"""What a policy does at every position of a log: the runtime's rules, positions as the batch.

A shape that learns from a request's earlier rounds cannot be decided at all positions at once:
what it does at one depends on the rounds before it. The requests of a chunk step together
instead, one round a step, each with its own memory as live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.logs.logged_draft import LoggedDraft, logged_draft, logged_drafts
from specctl.logs.positions import Bools, Floats, Ints, Longs, Positions, join_rows
from specctl.logs.tree_log import TEXT_COLUMNS, LogChunk
from specctl.policy import (
    Chain,
    EntropyStop,
    FullTree,
    JointThreshold,
    PerRequest,
    Policy,
    RootOnly,
    ScoredTree,
    Shape,
    SignalStop,
    SparseGates,
    StaticTree,
    Strict,
    build_shape,
)
from specctl.policy.rules import RoundStart, ShapeRule
from specctl.policy.verification import Outcome
from specctl.tree import take

WITHOUT_ENTROPY = (RootOnly, Chain, StaticTree, FullTree, JointThreshold, SparseGates)
"""Shapes that never look at an entropy, so that the log's need not be read."""
RANKED = (RootOnly, Chain, SignalStop, StaticTree, FullTree, JointThreshold)
"""Shapes whose known nodes stand whatever is unknown below less likely ones, so that bounds are
close: they expand and submit by joint probability alone, or are chains, which end where the log
does."""


@dataclass(frozen=True)
class Outcomes:
    """One policy at R positions; int32 arrays `[R]`.

    Attributes:
        accepted: draft tokens accepted and emitted. low, high: bounds of it where the log lacks
            what the policy wanted; equal to it elsewhere.
        verified: nodes submitted, root included.
        drafted: candidates drafted, root excluded.
        levels: levels drafted. expanded: nodes that the drafter evaluated, roots excluded.
        tcr: terminal confidence rank, 1-based; 0 where nothing was accepted.
        wanted, missing: expansions that the policy wanted, and those that the log lacks.
        censored: 1 where the accepted path reaches what the log lacks.
        bins: the policy's regime, -1 for none.
    """

    accepted: Ints
    low: Ints
    high: Ints
    verified: Ints
    drafted: Ints
    levels: Ints
    expanded: Ints
    tcr: Ints
    wanted: Ints
    missing: Ints
    censored: Ints
    bins: Ints

    def pick(self, rows: Bools | Longs) -> Outcomes:
        """Some rows, by index or mask."""
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Outcomes(*(getattr(self, field.name)[index] for field in fields(Outcomes)))


def support_of(wanted: Ints, missing: Ints, censored: Ints) -> float:
    """The share of the wanted expansions or of the rounds, the lesser, that the log contains."""
    lacking = float(missing.sum()) / max(1.0, float(wanted.sum()))
    return min(1 - lacking, 1 - float(censored.mean()))


def check_replayable(policy: Policy) -> None:
    """Refuses what a log of the target's own text cannot tell."""
    if not isinstance(policy.acceptance, Strict):
        raise UsageError(
            f"replay of {policy.name}",
            expected="a lossless policy, whose text is the logged one",
            found=f"acceptance {policy.acceptance.kind}",
            fix="compare it live, on the same prompts: specctl run --compare",
        )
    if not isinstance(policy.budget, PerRequest):
        raise UsageError(
            f"replay of {policy.name}, position by position",
            expected="a policy that decides for one request at a time",
            found=f"budget {policy.budget.kind}, shared by a batch",
            fix="give --batch-size, which simulates the batch",
        )


def needs_entropy(policy: Policy) -> bool:
    """Whether a policy may look at entropies."""
    return not isinstance(policy.shape, WITHOUT_ENTROPY)


def text_columns(policies: Iterable[Policy]) -> tuple[str, ...]:
    """Columns of the nodes table that policies read to compare tokens with the text."""
    return TEXT_COLUMNS if any(build_shape(p.shape).needs_text for p in policies) else ()


def is_ranked(shape: Shape) -> bool:
    """Whether bounds of a shape are close, see `RANKED`."""
    is_chain = (isinstance(shape, EntropyStop) and shape.top_k == 1) or (
        isinstance(shape, ScoredTree) and shape.first_top_k == 1
    )
    return is_chain or isinstance(shape, RANKED)


def is_online(policy: Policy) -> bool:
    """Whether a policy's shape learns from a request's earlier rounds."""
    return build_shape(policy.shape).memory_size > 0


def outcomes_of(policy: Policy, chunk: LogChunk) -> Outcomes:
    """Decides for every position of a chunk."""
    rule, by_rank = build_shape(policy.shape), is_ranked(policy.shape)
    if rule.memory_size:
        raise UsageError(
            f"{policy.name} at every position",
            expected="a shape that decides by the position alone",
            found="one that learns from the request's earlier rounds",
            fix="replay it request by request",
        )
    return join_rows([_outcomes_at(d, by_rank=by_rank) for d in logged_drafts(rule, chunk)])


@torch.inference_mode()
def _outcomes_at(draft: LoggedDraft, *, by_rank: bool) -> Outcomes:
    """What came of a draft. `by_rank`: see `is_ranked`."""
    tree, lacking = draft.pool.tree, draft.expansions
    accepted, remaining = draft.num_accepted, draft.remaining
    low, high = _accepted_bounds(draft, by_rank=by_rank)
    bins = draft.plan.bins if draft.plan.bins is not None else torch.full_like(accepted, -1)
    values = {
        "accepted": torch.minimum(accepted, remaining),
        "low": torch.minimum(low, remaining),
        "high": torch.minimum(high, remaining),
        "verified": (draft.submitted >= 0).sum(1),
        "drafted": tree.valid.sum(1) - 1,
        "levels": tree.depth.masked_fill(~tree.valid, 0).amax(1),
        "expanded": (lacking.wanted - 1).clamp(min=0),
        "tcr": draft.terminal_rank,
        "wanted": lacking.wanted,
        "missing": lacking.missing,
        "censored": lacking.is_open,
        "bins": bins,
    }
    return Outcomes(**{name: v.to(torch.int32).numpy() for name, v in values.items()})


def _accepted_bounds(draft: LoggedDraft, *, by_rank: bool) -> tuple[Tensor, Tensor]:
    """Least and most that a round can accept, given what the log does not tell.

    Where nothing is missing both are the accepted length, and where the path itself leaves the
    log it may go on to the plan's depth. Unknown nodes are no likelier than the nodes below which
    they are missing. A shape that ranks by joint probability keeps every known node that is at
    least as likely as those, whatever is unknown, and unknown nodes can only push others out. Of
    another shape nothing is certain.
    """
    lacking, accepted = draft.expansions, draft.num_accepted
    joint = draft.pool.joint_logp.gather(1, draft.submitted.clamp(min=0))
    safe = (draft.on_path & (joint >= lacking.best_missing[:, None])).sum(1) - 1
    least = safe.clamp(min=0) if by_rank else torch.zeros_like(accepted)
    closed = accepted if by_rank else torch.maximum(draft.matched.long(), accepted)
    most = torch.where(lacking.is_open, draft.plan.max_depth, closed)
    most = torch.maximum(torch.minimum(most, draft.plan.max_depth), accepted)
    exact = lacking.missing == 0
    return accepted.where(exact, least), accepted.where(exact, most)


# ----------------------------------------------------------------- shapes that learn


@dataclass(frozen=True)
class OnlineStep:
    """One round of each request that has not ended.

    Attributes:
        rows: `[A]` int64 numpy, positions of the chunk where the rounds start.
        outcome: what the shape learns from. Token ids are not logged for replay and are 0.
    """

    rows: Longs
    draft: LoggedDraft
    outcome: Outcome


def online_steps(rule: ShapeRule, chunk: LogChunk) -> Iterator[OnlineStep]:
    """The rounds of all requests of a chunk, side by side, first rounds first.

    Where the log lacks what a round wanted, the walk goes on with what it holds.
    """
    positions = chunk.positions
    here, end = positions.start[:-1].copy(), positions.start[1:]
    memory = torch.zeros(len(here), rule.memory_size, dtype=torch.float64)
    while len(here):
        start = RoundStart(len(here), memory)
        draft = logged_draft(rule, chunk, torch.from_numpy(here), start)
        outcome = _outcome_of(draft)
        yield OnlineStep(here, draft, outcome)
        memory = rule.observe(memory, outcome)
        here = here + draft.on_path.sum(1).numpy()
        inside = here < end
        here, end, memory = here[inside], end[inside], memory[torch.from_numpy(inside)]


def _outcome_of(draft: LoggedDraft) -> Outcome:
    """What the rules would be shown of a logged round."""
    tree = take(draft.pool.tree, draft.submitted)
    deepest = int(tree.depth.max())
    place = tree.depth.masked_fill(~draft.on_path, deepest + 1)
    slots = torch.arange(tree.num_slots).expand_as(place)
    path = torch.full((len(place), deepest + 2), -1).scatter(1, place, slots)
    nothing = torch.zeros_like(tree.token_ids)
    return Outcome(draft.pool, draft.submitted, tree, path[:, : deepest + 1], nothing)


@torch.inference_mode()
def walk_online(policy: Policy, chunk: LogChunk) -> tuple[Bools, Outcomes]:
    """Runs a shape over every request of a chunk.

    Returns:
        `[R]` bool, a round starts there; and the outcomes of these rows, in their order.
    """
    rule, by_rank = build_shape(policy.shape), is_ranked(policy.shape)
    found, rows = [], []
    for step in online_steps(rule, chunk):
        found.append(_outcomes_at(step.draft, by_rank=by_rank))
        rows.append(step.rows)
    order = np.concatenate(rows)
    visited = np.zeros(chunk.positions.num_rows, np.bool_)
    visited[order] = True
    return visited, join_rows(found).pick(order.argsort())


def online_bounds(
    policy: Policy, positions: Positions, visited: Bools, outcomes: Outcomes
) -> tuple[Floats, Floats, Floats, Floats]:
    """Least and most calls, least and most verified tokens of each request, `[Q]` float64.

    Exact up to the first round whose end the log does not tell. What comes later depends on what
    the shape would have learnt there, so all that is used is that a round emits between one token
    and a whole path, and verifies at least what it emits.
    """
    rule = build_shape(policy.shape)
    request, left = positions.request[visited], positions.remaining[visited].astype(np.float64)
    unsure = outcomes.censored > 0 if is_ranked(policy.shape) else outcomes.missing > 0
    # Unsure rounds of the same request before each round.
    earlier: Longs = np.cumsum(unsure) - unsure
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    before = earlier - np.repeat(earlier[starts], np.diff(np.append(starts, len(request))))
    sure, first = (before == 0) & ~unsure, (before == 0) & unsure
    most = np.where(outcomes.missing > 0, rule.max_tokens, outcomes.verified)

    def totals(of_sure: Floats, of_first: Floats) -> Floats:
        values = np.where(sure, of_sure, np.where(first, of_first, 0.0))
        return np.bincount(request, values, positions.num_requests).astype(np.float64)

    one = np.ones(len(request))
    return (
        totals(one, np.ceil(left / (rule.max_depth + 1))),
        totals(one, left),
        totals(outcomes.verified.astype(np.float64), left),
        totals(most.astype(np.float64), left * rule.max_tokens),
    )
