"""Where the accepted path stands in the confidence order: a per-position summary of one growth.

One pass over the nodes makes it; after that, every static tree (a depth and a size, of the
likeliest nodes) is scored from about a hundred bytes a position, without the trees.

For position r, of the pool that the static tree of (top_k, width) grows there,
`path_rank[r, d-1, j-1]` is the place, 1-based, of the j-th node of the accepted path among the
draft nodes of depth <= d, by joint probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import UsageError
from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.positions import Bools, Ints, Positions, join_rows
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy.rules import BaseShape, rank_order

BATCH_POSITIONS = 256
PART_POSITIONS = 1 << 16
"""Positions that are walked together, about a hundred bytes each."""
NOT_THERE = np.iinfo(np.int16).max
"""`path_rank` of a node that is not on the path, or deeper than d."""


@dataclass(frozen=True)
class Summary:
    """R positions of a log under one growth of D levels.

    Attributes:
        top_k: of the growth, children and width; every depth up to D is a prefix of it.
        path_rank: `[R, D, D]` int16, `NOT_THERE` beyond the path and below the depth.
        num_nodes: `[R, D]` int32, draft nodes of depth <= d.
        missing: `[R, D]` bool, the log lacks an expansion above depth d that the growth wanted.
    """

    positions: Positions
    top_k: int
    path_rank: NDArray[np.int16]
    num_nodes: Ints
    missing: Bools

    @property
    def depth(self) -> int:
        """D."""
        return int(self.path_rank.shape[1])


def summarise(log: DenseLog, **options: Any) -> Summary:
    """The summary of a whole log; options of `summaries`."""
    return join_rows(list(summaries(log, **options)))


def summaries(
    log: DenseLog,
    *,
    top_k: int,
    depth: int | None = None,
    num_threads: int = 1,
) -> Iterator[Summary]:
    """Reads a log once: summaries of about `PART_POSITIONS` each.

    Args:
        top_k: K and width of the static tree; 1 is the chain.
        depth: levels at most; the log's by default.
    """
    levels = depth or log.support.depth
    if top_k > log.support.top_k or levels > log.support.depth:
        raise UsageError(
            f"a static tree of depth {levels} and top_k {top_k}: expected at most what the log "
            f"holds, depth {log.support.depth} and top_k {log.support.top_k}, found more",
            hint=f"collect with --dense --depth {levels} --children {top_k}, or lower them",
        )
    rule = BaseShape(levels, top_k, top_k, max_tokens=1)

    def work(chunk: LogChunk) -> Summary:
        return _of_chunk(rule, chunk)

    found: list[Summary] = []
    for part in log.each(work, with_entropy=False, num_threads=num_threads):
        found.append(part)
        if sum(one.positions.num_rows for one in found) >= PART_POSITIONS:
            yield join_rows(found)
            found = []
    if found:
        yield join_rows(found)


def static_accepted(summary: Summary, depth: int, num_tokens: int) -> Ints:
    """`[R]` draft tokens that the static tree of that depth and size accepts.

    The path nodes inside the `num_tokens - 1` best of depth <= depth; ranks rise along a path, so
    counting them is enough.
    """
    _check_size(summary, depth, num_tokens)
    inside = summary.path_rank[:, depth - 1, :depth] < num_tokens
    accepted: Ints = np.minimum(inside.sum(1), summary.positions.remaining).astype(np.int32)
    return accepted


def static_verified(summary: Summary, depth: int, num_tokens: int) -> Ints:
    """`[R]` nodes that it submits, root included."""
    _check_size(summary, depth, num_tokens)
    return np.minimum(summary.num_nodes[:, depth - 1] + 1, num_tokens)


def _check_size(summary: Summary, depth: int, num_tokens: int) -> None:
    if not (1 <= depth <= summary.depth and num_tokens >= 2):
        raise UsageError(
            f"static tree of depth {depth}, num_tokens {num_tokens}: expected depth 1 to "
            f"{summary.depth}, num_tokens at least 2, found others",
            hint="summarise a deeper log, or lower the depth",
        )


@torch.inference_mode()
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
    """`[B, D]`: place of each path node among the nodes of depth <= limit, in their order."""
    inside = depth <= limit
    places = inside.cumsum(1)
    table = places.new_full((len(places), num_levels), NOT_THERE)
    row, place = (on_path & inside).nonzero(as_tuple=True)
    table[row, depth[row, place] - 1] = places[row, place]
    return table
