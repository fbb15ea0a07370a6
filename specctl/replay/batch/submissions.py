"""What a policy's shape submits at every position of a log, kept for batches to draw on.

Drafting does not depend on the batch, so it is decided once for all positions; which requests
meet in a batch, and what a shared budget then leaves of their trees, is decided by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.logs.logged_draft import BATCH_POSITIONS, LoggedDraft, batches, logged_draft
from specctl.logs.positions import Ints, Positions, join_positions
from specctl.logs.tree_log import DenseLog, LogChunk, Support, map_ordered
from specctl.policy import Policy, build_shape
from specctl.policy.records import PerRequest, RootOnly
from specctl.policy.rules import ShapeRule
from specctl.replay.batch.nodes import SubmittedNodes, join_nodes, nodes_of
from specctl.replay.online import is_online, walk_online
from specctl.replay.outcomes import check_replayable, needs_entropy, text_columns


@dataclass(frozen=True)
class Submissions:
    """What one policy's shape does at R positions; int32 arrays `[R]`, 24 bytes a position.

    Of a shape that learns from a request's earlier rounds only the positions that its rounds
    start from are known, and the others are 0: a request always stands at one of these, because
    without a shared budget its rounds do not depend on who shares its batch.

    Attributes:
        drafts: the shape drafts at all.
        max_tokens: nodes submitted at most, root counted.
        accepted, verified: where a request verifies all that it submits.
        levels, asked, missing, open: as in `Outcomes`.
        nodes: the trees; None where no budget needs them.
    """

    policy: Policy
    positions: Positions
    drafts: bool
    max_tokens: int
    accepted: Ints
    verified: Ints
    levels: Ints
    asked: Ints
    missing: Ints
    open: Ints
    nodes: SubmittedNodes | None


COUNTS = ("accepted", "verified", "levels", "asked", "missing", "open")


def shares(policy: Policy) -> bool:
    """Whether the requests of a batch depend on each other: the budget is asked, and can trim."""
    return not isinstance(policy.budget, PerRequest) and not isinstance(policy.shape, RootOnly)


def submissions_of(
    log: DenseLog,
    policies: Sequence[Policy],
    *,
    keep_nodes: bool = False,
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
) -> list[Submissions]:
    """Decides for every position under every policy, in one pass over the log.

    Args:
        keep_nodes: also where the policy's own budget does not need them, so that other budgets
            can be tried over the same shape.
        num_threads: chunks decided at a time; results do not depend on it.
        on_positions: called with the positions of each finished chunk.

    Raises:
        UsageError: a lossy policy, or a budget over a shape whose rounds would then depend on
            the batch. TraceError: see `DenseLog`.
    """
    for policy in policies:
        check_replayable(policy.model_copy(update={"budget": PerRequest()}))
    kept = [shares(policy) or keep_nodes for policy in policies]
    for policy, keep in zip(policies, kept, strict=True):
        _check_order(policy, keep_nodes=keep)
    chunks = log.chunks(
        with_entropy=any(kept) or any(needs_entropy(policy) for policy in policies),
        extra=text_columns(policies),
    )
    rules = [build_shape(policy.shape) for policy in policies]
    parts: list[list[_Part]] = [[] for _ in policies]

    def decide(chunk: LogChunk) -> list[_Part]:
        return [
            _walked(policy, chunk, log.support)
            if rule.memory_size
            else _of_chunk(rule, chunk, log.support, keep_nodes=keep)
            for policy, rule, keep in zip(policies, rules, kept, strict=True)
        ]

    for found in map_ordered(decide, chunks, num_threads):
        for into, part in zip(parts, found, strict=True):
            into.append(part)
        if on_positions is not None:
            on_positions(found[0].positions.num_rows)
    return [_joined(p, r, of) for p, r, of in zip(policies, rules, parts, strict=True)]


def kept_nodes(submissions: Submissions) -> SubmittedNodes:
    """The trees.

    Raises:
        UsageError: they were not kept.
    """
    if submissions.nodes is None:
        raise UsageError(
            "shared budget",
            expected="submissions with their trees",
            found="counts alone",
            fix="prepare them with keep_nodes",
        )
    return submissions.nodes


def _check_order(policy: Policy, *, keep_nodes: bool) -> None:
    """Refuses trees of a shape that learns: what it drafts depends on what was verified before."""
    if keep_nodes and is_online(policy):
        raise UsageError(
            f"replay of {policy.name} under a shared budget",
            expected="a shape that decides by the position alone",
            found=f"{policy.shape.kind}, which learns from what the budget lets it verify",
            fix="compare it live: specctl run --compare, or leave the budget out",
        )


class _Part(NamedTuple):
    """One chunk: its positions, `[6, R]` int32 in the order of `COUNTS`, and its trees."""

    positions: Positions
    counts: Ints
    nodes: SubmittedNodes | None


@torch.inference_mode()
def _of_chunk(rule: ShapeRule, chunk: LogChunk, support: Support, *, keep_nodes: bool) -> _Part:
    positions = chunk.positions
    counts: list[Tensor] = []
    nodes: list[SubmittedNodes] = []
    for rows in batches(positions.num_rows, BATCH_POSITIONS):
        draft = logged_draft(rule, chunk, rows)
        on_path = draft.on_path
        counts.append(_counts(draft, on_path, torch.tensor(positions.remaining[rows])))
        if keep_nodes:
            nodes.append(nodes_of(draft, on_path))
    columns = torch.cat(counts, 1).to(torch.int32).numpy()
    return _Part(positions, columns, join_nodes(nodes) if keep_nodes else None)


def _walked(policy: Policy, chunk: LogChunk, support: Support) -> _Part:
    """The rounds of a shape that learns, at the positions where they start."""
    walk = walk_online(policy, chunk)
    columns = np.zeros((len(COUNTS), chunk.positions.num_rows), np.int32)
    columns[:, walk.visited] = [getattr(walk.outcomes, name) for name in COUNTS]
    return _Part(chunk.positions, columns, None)


def _counts(draft: LoggedDraft, on_path: Tensor, remaining: Tensor) -> Tensor:
    """`[6, B]` int64, in the order of `COUNTS`."""
    tree = draft.pool.tree
    return torch.stack(
        [
            torch.minimum(on_path.sum(1) - 1, remaining),
            (draft.submitted >= 0).sum(1),
            tree.depth.masked_fill(~tree.valid, 0).amax(1),
            draft.expansions.wanted,
            draft.expansions.missing,
            draft.expansions.is_open.long(),
        ]
    )


def _joined(policy: Policy, rule: ShapeRule, parts: list[_Part]) -> Submissions:
    nodes = [part.nodes for part in parts if part.nodes is not None]
    columns = np.concatenate([part.counts for part in parts], 1)
    return Submissions(
        policy=policy,
        positions=join_positions([part.positions for part in parts]),
        drafts=rule.max_depth > 0,
        max_tokens=rule.max_tokens,
        **dict(zip(COUNTS, columns, strict=True)),
        nodes=join_nodes(nodes) if nodes else None,
    )
