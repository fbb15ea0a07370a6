"""What a policy does at every position of a log: the runtime's rules, positions as the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.positions import Ints, Longs
from specctl.logs.tree_log import TEXT_COLUMNS, LogChunk
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


def outcomes_of(policy: Policy, chunk: LogChunk) -> Outcomes:
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
    return join_outcomes(
        [
            outcomes_at(draft, draft.on_path, chunk, draft.rows, by_rank=by_rank)
            for draft in logged_drafts(rule, chunk)
        ]
    )


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
        on_path: `[B, N]` bool, of the draft. by_rank: see `is_ranked`.
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
        "expanded": (draft.expansions.wanted - 1).clamp(min=0),
        "tcr": draft.terminal_rank,
        "asked": draft.expansions.wanted,
        "missing": draft.expansions.missing,
        "open": draft.expansions.is_open,
        "bins": bins,
    }
    return Outcomes(**{name: v.to(torch.int32).numpy() for name, v in values.items()})


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
