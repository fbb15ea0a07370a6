"""Where the accepted path stands in the confidence order: a per-position summary of one growth.

One pass over the nodes makes it; after that, every policy that submits a prefix of the order (a
static size, a depth, a threshold, a share of a budget) is scored from about a hundred bytes a
position, without the trees.

For position r, of the pool that the static tree of (top_k, width) grows there:

    path_logp[r, j-1]       joint log-probability of the j-th node of the accepted path
    path_rank[r, d-1, j-1]  its place, 1-based, among the draft nodes of depth <= d
    order_logp[r, m]        the m-th best joint log-probability, order_depth[r, m] its depth
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import UsageError
from specctl.logs.logged_draft import LoggedDraft, logged_drafts
from specctl.logs.positions import Bools, Ints, Positions, join_positions
from specctl.logs.tree_log import DenseLog, LogChunk
from specctl.policy.rules import BaseShape, rank_order

BATCH_POSITIONS = 256
NOT_THERE = np.iinfo(np.int16).max
"""`path_rank` of a node that is not on the path, or deeper than d."""


@dataclass(frozen=True)
class Summary:
    """R positions of a log under one growth; D levels, the M best nodes of each.

    Attributes:
        top_k, width: of the growth; every depth up to D is a prefix of it.
        path_logp: `[R, D]` float32, -inf beyond the path.
        path_rank: `[R, D, D]` int16, `NOT_THERE` beyond the path and below the depth.
        num_nodes: `[R, D]` int32, draft nodes of depth <= d.
        order_logp: `[R, M]` float32, falling, -inf padded. order_depth: `[R, M]` int8.
        order_on_path: `[R, M]` bool.
        missing: `[R, D]` bool, the log lacks an expansion above depth d that the growth asked for.
    """

    positions: Positions
    top_k: int
    width: int
    path_logp: NDArray[np.float32]
    path_rank: NDArray[np.int16]
    num_nodes: Ints
    order_logp: NDArray[np.float32]
    order_depth: NDArray[np.int8]
    order_on_path: Bools
    missing: Bools

    @property
    def depth(self) -> int:
        """D."""
        return int(self.path_logp.shape[1])

    @property
    def num_kept(self) -> int:
        """M."""
        return int(self.order_logp.shape[1])


def summarise(
    log: DenseLog,
    *,
    top_k: int,
    depth: int | None = None,
    num_kept: int = 128,
    num_threads: int = 1,
    on_positions: Callable[[int], None] | None = None,
) -> Summary:
    """Reads a log once.

    Args:
        top_k: K and width of the static tree; 1 is the chain.
        depth: levels at most; the log's by default.
        num_kept: M.

    Raises:
        UsageError: deeper or wider than the log.
    """
    levels = depth or log.support.depth
    if top_k > log.support.top_k or levels > log.support.depth:
        raise UsageError(
            f"summary of depth {levels}, top_k {top_k}",
            expected=f"at most the log's, depth {log.support.depth} and top_k {log.support.top_k}",
            found="more",
            fix="collect a deeper or wider log, or lower them",
        )
    rule = BaseShape(levels, top_k, top_k, num_kept + 1)

    def work(chunk: LogChunk) -> Summary:
        return _of_chunk(rule, chunk, num_kept)

    parts = log.each(work, with_entropy=False, num_threads=num_threads, on_positions=on_positions)
    return join_summaries(list(parts))


def join_summaries(parts: list[Summary]) -> Summary:
    """The positions of all parts; of one growth."""
    first = parts[0]
    positions = join_positions([part.positions for part in parts])
    names = [field.name for field in fields(Summary)[3:]]
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return Summary(positions, first.top_k, first.width, *arrays)


def static_accepted(summary: Summary, depth: int, num_tokens: int) -> Ints:
    """`[R]` draft tokens that the static tree of that depth and size accepts.

    The path nodes inside the `num_tokens - 1` best of depth <= depth; ranks rise along a path, so
    counting them is enough.
    """
    _check_size(summary, depth, num_tokens)
    inside = summary.path_rank[:, depth - 1, :depth] < num_tokens
    return _within_text(summary, inside.sum(1))


def static_verified(summary: Summary, depth: int, num_tokens: int) -> Ints:
    """`[R]` nodes that it submits, root included."""
    _check_size(summary, depth, num_tokens)
    return np.minimum(summary.num_nodes[:, depth - 1] + 1, num_tokens)


def threshold_accepted(summary: Summary, depth: int, min_logp: float) -> Ints:
    """`[R]` accepted by the tree of all nodes of joint log-probability `min_logp` or more."""
    _check_size(summary, depth)
    return _within_text(summary, (summary.path_logp[:, :depth] >= min_logp).sum(1))


def threshold_verified(summary: Summary, depth: int, min_logp: float) -> Ints:
    """`[R]` nodes that it submits, root included.

    Raises:
        UsageError: a tree may hold more than the M nodes that the summary kept.
    """
    _check_size(summary, depth)
    inside = summary.order_logp >= min_logp
    if inside[:, -1].any() and (summary.num_nodes[:, -1] > summary.num_kept).any():
        raise UsageError(
            f"threshold {min_logp:g} nats",
            expected=f"at most {summary.num_kept} nodes at or above it",
            found="more at some position",
            fix="summarise with a larger num_kept, or raise it",
        )
    inside = inside & (summary.order_depth <= depth)
    size: Ints = (inside.sum(1) + 1).astype(np.int32)
    return size


def _within_text(summary: Summary, accepted: Ints) -> Ints:
    inside: Ints = np.minimum(accepted, summary.positions.remaining).astype(np.int32)
    return inside


@torch.inference_mode()
def _of_chunk(rule: BaseShape, chunk: LogChunk, num_kept: int) -> Summary:
    drafts = logged_drafts(rule, chunk, BATCH_POSITIONS)
    parts = [_of_draft(draft, rule.max_depth, num_kept) for draft in drafts]
    arrays: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Summary(chunk.positions, rule.top_k, rule.width, *arrays)


def _of_draft(draft: LoggedDraft, num_levels: int, num_kept: int) -> tuple[Any, ...]:
    """The arrays of `Summary`, from `path_logp` on, of some rows."""
    tree = draft.pool.tree
    order = rank_order(draft.pool.joint_logp[:, 1:]) + 1  # the root is in every tree
    depth = tree.depth.masked_fill(~tree.valid, num_levels + 1).gather(1, order)
    logp = draft.pool.joint_logp.gather(1, order)
    on_path = (draft.candidates_on_path & tree.valid).gather(1, order)
    levels = range(1, num_levels + 1)
    ranks = torch.stack([_ranks(on_path, depth, d, num_levels) for d in levels], 1)
    path_logp = _by_depth(logp, on_path, depth, num_levels, float("-inf"))
    kept = [values[:, :num_kept] for values in (logp, depth.to(torch.int8), on_path)]
    sizes = torch.stack([(depth <= d).sum(1) for d in levels], 1).to(torch.int32)
    missing = _missing_above(draft, num_levels)
    found = (path_logp, ranks.to(torch.int16), sizes, *kept, missing)
    return tuple(tensor.numpy() for tensor in found)


def _ranks(on_path: Tensor, depth: Tensor, limit: int, num_levels: int) -> Tensor:
    """`[B, D]`: place of each path node among the nodes of depth <= limit, in their order."""
    places = (depth <= limit).cumsum(1)
    on_path = on_path & (depth <= limit)
    return _by_depth(places, on_path, depth, num_levels, NOT_THERE)


def _by_depth(
    values: Tensor, on_path: Tensor, depth: Tensor, num_levels: int, fill: float
) -> Tensor:
    """`[B, D]`: the value at the path node of each depth, `fill` where there is none."""
    table = values.new_full((len(values), num_levels), fill)
    row, place = on_path.nonzero(as_tuple=True)
    table[row, depth[row, place] - 1] = values[row, place]
    return table


def _missing_above(draft: LoggedDraft, num_levels: int) -> Tensor:
    """`[B, D]` bool: an expanded node of depth < d has no children in the log."""
    tree = draft.pool.tree
    unknown = draft.chunk.first_child[draft.node.clamp(min=0)] < 0
    lacking = draft.pool.expanded & unknown & tree.valid
    level = torch.arange(1, num_levels + 1)
    shallowest = tree.depth.masked_fill(~lacking, num_levels + 1).amin(1)
    return shallowest[:, None] < level


def _check_size(summary: Summary, depth: int, num_tokens: int = 2) -> None:
    if not (1 <= depth <= summary.depth and num_tokens >= 2):
        raise UsageError(
            f"static tree of depth {depth}, num_tokens {num_tokens}",
            expected=f"depth 1 to {summary.depth}, num_tokens at least 2",
            found="others",
            fix="summarise a deeper log, or lower the depth",
        )
