"""Static settings, chains and EAGLE-2 trees: one pass over the nodes for each width.

At position r, `path_rank[r, d-1, j-1]` is the 1-based rank by joint probability of the j-th node of
the accepted path, among the draft nodes of depth <= d of the pool that the static tree of (top_k,
width) grows there. All depths and sizes of that width are scored from it, in about a hundred bytes
a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.lazy import Tensor, inference, torch
from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.positions import Bools, Ints, Positions, join_rows
from specctl.logs.tree_log import DenseLog, LogChunk, map_chunks
from specctl.policy import Chain, Policy, StaticTree, build_shape
from specctl.policy.rules import BaseShape, rank_order
from specctl.replay.outcomes import Outcomes
from specctl.replay.submissions import Submissions

BATCH_POSITIONS = 256
NOT_THERE = np.iinfo(np.int16).max
"""`path_rank` of a node that is not on the path, or deeper than d."""


def is_static(policy: Policy) -> bool:
    """Whether a policy can be scored from a `Summary`."""
    return isinstance(policy.shape, Chain | StaticTree) and not policy.additions


def static_submissions(
    log: DenseLog, policies: Sequence[Policy]
) -> Iterator[tuple[int, Submissions]]:
    """Index and submissions of every static policy within the log's trees.

    They come width by width, with one summary in memory. A round with a missing expansion counts as
    censored.
    """
    held = log.support
    rules = {i: build_shape(one.shape) for i, one in enumerate(policies) if is_static(one)}
    rules = {
        index: rule
        for index, rule in rules.items()
        if rule.max_depth <= held.depth and rule.top_k <= held.top_k
    }
    for top_k in sorted({rule.top_k for rule in rules.values()}):
        same = {index: rule for index, rule in rules.items() if rule.top_k == top_k}
        depth = max(rule.max_depth for rule in same.values())
        summary = summarise(log, top_k=top_k, depth=depth)
        for index, rule in same.items():
            outcomes = static_outcomes(summary, rule.max_depth, rule.max_tokens)
            of = (summary.positions, outcomes, rule.max_tokens)
            yield index, Submissions(policies[index], *of)


@dataclass(frozen=True)
class Summary:
    """R positions of a log under one growth of D levels."""

    positions: Positions
    top_k: int  # children and width of the growth
    path_rank: NDArray[np.int16]  # `[R, D, D]`, `NOT_THERE` off the path and below the depth
    num_nodes: Ints  # `[R, D]` int32, draft nodes of depth <= d
    missing: Bools  # `[R, D]` bool, the log lacks a wanted expansion above depth d


def summarise(log: DenseLog, *, top_k: int, depth: int | None = None) -> Summary:
    """Reads a log once.

    Args:
        top_k: K and width of the static tree; 1 for the chain.
        depth: most levels; the log's by default.
    """
    levels = depth or log.support.depth
    rule = BaseShape(levels, top_k, top_k, max_tokens=1)
    return join_rows(list(map_chunks(log, partial(_of_chunk, rule), ())))


def static_outcomes(summary: Summary, depth: int, num_tokens: int) -> Outcomes:
    """The outcomes of the static tree of this depth and size at every position.

    The path nodes among the `num_tokens - 1` best of depth <= depth are accepted. Ranks rise along
    a path, so their count is the accepted length.
    """
    inside = summary.path_rank[:, depth - 1, :depth] < num_tokens
    accepted: Ints = np.minimum(inside.sum(1), summary.positions.remaining).astype(np.int32)
    missing = summary.missing[:, depth - 1]
    return Outcomes.of(
        accepted,
        verified=np.minimum(summary.num_nodes[:, depth - 1] + 1, num_tokens),
        levels=depth,
        wanted=1 + (depth - 1) * summary.top_k,
        missing=missing,
        censored=missing,
    )


@inference
def _of_chunk(rule: BaseShape, chunk: LogChunk) -> Summary:
    parts = [_of_draft(draft, rule) for draft in logged_drafts(rule, chunk, BATCH_POSITIONS)]
    arrays: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Summary(chunk.positions, rule.top_k, *arrays)


def _of_draft(draft: LoggedDraft, rule: BaseShape) -> tuple[Any, ...]:
    """Path ranks, node counts and missing expansions of some rows."""
    tree, levels = draft.pool, torch.arange(1, rule.max_depth + 1)
    order = rank_order(draft.pool.joint_logp[:, 1:]) + 1  # the root is in every tree
    depth = tree.depth.masked_fill(~tree.valid, rule.max_depth + 1).gather(1, order)
    on_path = (draft.candidates_on_path & tree.valid).gather(1, order)
    ranks = torch.stack([_ranks(on_path, depth, d, len(levels)) for d in levels.tolist()], 1)
    sizes = torch.stack([(depth <= d).sum(1) for d in levels.tolist()], 1).to(torch.int32)
    unknown = draft.chunk.first_child[draft.node.clamp(min=0)] < 0
    lacking = draft.pool.expanded & unknown & tree.valid
    shallowest = tree.depth.masked_fill(~lacking, rule.max_depth + 1).amin(1)
    missing = shallowest[:, None] < levels
    return ranks.to(torch.int16).numpy(), sizes.numpy(), missing.numpy()


def _ranks(on_path: Tensor, depth: Tensor, limit: int, num_levels: int) -> Tensor:
    """`[B, D]`: rank of each path node among the nodes of depth <= limit."""
    inside = depth <= limit
    places = inside.cumsum(1)
    table = places.new_full((len(places), num_levels), NOT_THERE)
    row, place = (on_path & inside).nonzero(as_tuple=True)
    table[row, depth[row, place] - 1] = places[row, place]
    return table
