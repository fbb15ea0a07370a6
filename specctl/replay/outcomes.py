"""What a policy does at every position of a log: the runtime's rules, positions as the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.features import DraftPool
from specctl.policy import Policy, build_shape
from specctl.policy.records import (
    Chain,
    EntropyStop,
    FullTree,
    JointThreshold,
    PerRequest,
    RootOnly,
    ScoredTree,
    Shape,
    SignalStop,
    SparseGates,
    StaticTree,
    Strict,
)
from specctl.policy.rules import Plan, RoundStart, ShapeRule, fresh_start, rank_order
from specctl.replay.log import TEXT_COLUMNS, LogChunk, Support
from specctl.replay.positions import Ints, Longs
from specctl.replay.source import Expansions, LogSource, recent_text
from specctl.runtime.growth import grow_tree, new_pool
from specctl.runtime.metrics import Stopwatch

BATCH_POSITIONS = 512
"""Positions decided together; their pools stay within the processor's cache."""
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
            what the policy asked for; equal to it elsewhere.
        verified: nodes submitted, root included.
        drafted: candidates drafted, root excluded.
        levels: levels drafted. expanded: nodes that the drafter evaluated, roots excluded.
        tcr: terminal confidence rank, 1-based; 0 where nothing was accepted.
        asked, missing: expansions that the policy wanted, and those that the log lacks.
        open: 1 where the accepted path reaches what the log lacks: the round is censored.
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
    asked: Ints
    missing: Ints
    open: Ints
    bins: Ints


def join_outcomes(parts: Sequence[Outcomes]) -> Outcomes:
    """The rows of all parts, in order."""
    names = [field.name for field in fields(Outcomes)]
    return Outcomes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def pick_outcomes(outcomes: Outcomes, rows: np.ndarray) -> Outcomes:
    """Some rows, by index or mask."""
    return Outcomes(*(getattr(outcomes, field.name)[rows] for field in fields(Outcomes)))


def check_replayable(policy: Policy) -> None:
    """Refuses what a log of the target's own text cannot tell.

    Raises:
        UsageError: a lossy acceptance, or a budget that only a batch can share.
    """
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


def outcomes_of(policy: Policy, chunk: LogChunk, support: Support) -> Outcomes:
    """Decides for every position of a chunk.

    Raises:
        UsageError: a shape that learns from a request's earlier rounds; see `replay.online`.
    """
    rule, by_rank = build_shape(policy.shape), is_ranked(policy.shape)
    if rule.memory_size:
        raise UsageError(
            f"{policy.name} at every position",
            expected="a shape that decides by the position alone",
            found="one that learns from the request's earlier rounds",
            fix="replay it request by request",
        )
    parts = []
    for rows in batches(chunk.positions.num_rows, BATCH_POSITIONS):
        draft = logged_draft(rule, chunk, rows, support)
        on_path = submitted_on_path(draft, chunk)
        parts.append(outcomes_at(draft, on_path, chunk, rows, by_rank=by_rank))
    return join_outcomes(parts)


def batches(num_rows: int, size: int) -> Iterator[slice]:
    """`num_rows` in slices of `size`."""
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


@dataclass(frozen=True)
class LoggedDraft:
    """A round's draft, from the log.

    Attributes:
        pool: candidates, `[B, P]`. submitted: `[B, N]` pool indices, -1 padded.
        node: `[B, P]` flat log index of each candidate, -1 for none.
    """

    plan: Plan
    pool: DraftPool
    submitted: Tensor
    node: Tensor
    expansions: Expansions


@torch.inference_mode()
def logged_draft(
    rule: ShapeRule,
    chunk: LogChunk,
    rows: slice | Tensor,
    support: Support,
    start: RoundStart | None = None,
) -> LoggedDraft:
    """Grows and selects as a round would, the log in the place of the drafter.

    Args:
        rows: positions of the chunk, B of them.
        start: what the rule remembers of their requests; None for first rounds.
    """
    source = LogSource(chunk, rows, support)
    root_ids = torch.zeros_like(source.node[:, 0])
    plan = rule.begin(start or fresh_start(len(root_ids), rule.memory_size))
    if rule.max_depth == 0:
        pool = new_pool(root_ids, 1).view()
        return LoggedDraft(
            plan, pool, torch.zeros_like(root_ids)[:, None], source.node, source.expansions
        )
    recent = recent_text(chunk, rows) if rule.needs_text else None
    pool = grow_tree(rule, plan, source, root_ids, Stopwatch(), recent)
    return LoggedDraft(plan, pool, rule.select(plan, pool), source.node, source.expansions)


@torch.inference_mode()
def outcomes_at(
    draft: LoggedDraft,
    on_path: Tensor,
    chunk: LogChunk,
    rows: slice | Longs,
    *,
    by_rank: bool,
) -> Outcomes:
    """What came of a draft at some positions.

    Args:
        on_path: `[B, N]` bool, from `submitted_on_path`. by_rank: see `is_ranked`.
    """
    pool, remaining = draft.pool, torch.tensor(chunk.positions.remaining[rows])
    accepted = on_path.sum(1) - 1
    matched = torch.tensor(chunk.matched[rows])
    low, high = _bounds(draft, on_path, matched, by_rank=by_rank)
    levels = pool.tree.depth.masked_fill(~pool.tree.valid, 0).amax(1)
    bins = draft.plan.bins if draft.plan.bins is not None else torch.full_like(accepted, -1)
    values = {
        "accepted": torch.minimum(accepted, remaining),
        "low": torch.minimum(low, remaining),
        "high": torch.minimum(high, remaining),
        "verified": (draft.submitted >= 0).sum(1),
        "drafted": pool.tree.valid.sum(1) - 1,
        "levels": levels,
        "expanded": (draft.expansions.asked - 1).clamp(min=0),
        "tcr": terminal_rank(draft, on_path),
        "asked": draft.expansions.asked,
        "missing": draft.expansions.missing,
        "open": draft.expansions.is_open,
        "bins": bins,
    }
    return Outcomes(**{name: v.to(torch.int32).numpy() for name, v in values.items()})


def submitted_on_path(draft: LoggedDraft, chunk: LogChunk) -> Tensor:
    """`[B, N]` bool: the submitted node's path is a prefix of the continuation."""
    node = draft.node.gather(1, draft.submitted.clamp(min=0))
    return chunk.on_path[node.clamp(min=0)] & (draft.submitted >= 0) & (node >= 0)


def _bounds(
    draft: LoggedDraft, on_path: Tensor, matched: Tensor, *, by_rank: bool
) -> tuple[Tensor, Tensor]:
    """Least and most that a round can accept, given what the log does not tell.

    Where nothing is missing both are the accepted length, and where the path itself leaves the
    log it may go on to the plan's depth. Unknown nodes are no likelier than the nodes below which
    they are missing. A shape that ranks by joint probability keeps every known node that is at
    least as likely as those, whatever is unknown, and unknown nodes can only push others out. Of
    another shape nothing is certain.
    """
    lacking, accepted = draft.expansions, on_path.sum(1) - 1
    joint = draft.pool.joint_logp.gather(1, draft.submitted.clamp(min=0))
    safe = (on_path & (joint >= lacking.best_missing[:, None])).sum(1) - 1
    least = safe.clamp(min=0) if by_rank else torch.zeros_like(accepted)
    closed = accepted if by_rank else torch.maximum(matched.long(), accepted)
    most = torch.where(lacking.is_open, draft.plan.max_depth, closed)
    most = torch.maximum(torch.minimum(most, draft.plan.max_depth), accepted)
    exact = lacking.missing == 0
    return accepted.where(exact, least), accepted.where(exact, most)


def terminal_rank(draft: LoggedDraft, on_path: Tensor) -> Tensor:
    """Rank by joint probability, among the submitted draft nodes, of the deepest accepted one."""
    index = draft.submitted[:, 1:]
    if index.shape[1] == 0:
        return torch.zeros(len(index), dtype=torch.int64)
    scores = draft.pool.joint_logp.gather(1, index.clamp(min=0)).masked_fill(index < 0, -torch.inf)
    order = rank_order(scores)
    accepted = on_path[:, 1:].gather(1, order)
    places = torch.arange(1, order.shape[1] + 1)
    return (places * accepted).amax(1)
