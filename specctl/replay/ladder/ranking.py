"""Logged trees in the order of an estimate: the best nodes of every position, best first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.logs.logged_draft import batches, logged_draft
from specctl.logs.node_table import TARGET_COLUMNS, Singles, node_table
from specctl.logs.positions import Bools, Ints, Positions, join_positions
from specctl.logs.tree_log import DenseLog, LogChunk, Support
from specctl.policy.rules import BaseShape, top_order
from specctl.replay.ladder.estimates import Estimate, joint_acceptance

BATCH_POSITIONS = 256
NOT_THERE = np.iinfo(np.int8).max
"""Depth of an empty slot: deeper than any tree."""


@dataclass(frozen=True)
class Ranked:
    """R positions; the M best nodes of each, among those that a tree of `width` drafts.

    Any prefix of the order is a closed tree, and so is what depth <= d leaves of it. Six bytes a
    node.

    Attributes:
        width: top_k and frontier of the growth.
        prob: `[R, M]` float32, estimated joint acceptance, falling, 0 in empty slots.
        depth: `[R, M]` int8. on_path: `[R, M]` bool.
    """

    positions: Positions
    width: int
    prob: Singles
    depth: NDArray[np.int8]
    on_path: Bools


def rank_log(
    log: DenseLog,
    estimates: Mapping[str, Estimate],
    widths: Sequence[int],
    *,
    num_kept: int,
    on_positions: Callable[[int], None] = lambda _: None,
) -> tuple[dict[tuple[str, int], Ranked], Ints]:
    """Reads a log once.

    Returns:
        By name of the estimate and width, the ranked trees; and `[R]` int32, how far the logged
        tree of each position follows the text.
    """
    parts: dict[tuple[str, int], list[Ranked]] = {}
    matched: list[Ints] = []
    for chunk in log.chunks(extra=TARGET_COLUMNS):
        nodes = node_table(chunk)
        pools = [grow_pools(chunk, width, log.support) for width in widths]
        wanted = _drafted(pools, chunk.num_nodes)
        for name, estimate in estimates.items():
            joint = joint_acceptance(estimate, nodes, chunk.positions, wanted)
            for pool in pools:
                found = rank_pools(chunk, pool, joint, num_kept)
                parts.setdefault((name, pool.width), []).append(found)
        matched.append(chunk.matched)
        on_positions(chunk.positions.num_rows)
    return {key: _joined(found) for key, found in parts.items()}, np.concatenate(matched)


@dataclass(frozen=True)
class Pools:
    """What the static tree of (top_k width, width) drafts at R positions.

    Attributes:
        node: per batch of rows `[B, P]` int64, flat log index, -1 in empty slots and for roots,
            which are in every tree. depth: the same shape, int8, `NOT_THERE` in those.
    """

    width: int
    node: list[Tensor]
    depth: list[Tensor]


@torch.inference_mode()
def grow_pools(chunk: LogChunk, width: int, support: Support) -> Pools:
    """The runtime's own growth over a chunk."""
    rule = BaseShape(support.depth, width, width, 2)
    pools = Pools(width, [], [])
    for rows in batches(chunk.positions.num_rows, BATCH_POSITIONS):
        draft = logged_draft(rule, chunk, rows)
        tree, node = draft.pool.tree, draft.node
        empty = ~tree.valid | (node < 0)
        empty[:, 0] = True
        pools.node.append(node.masked_fill(empty, -1))
        pools.depth.append(tree.depth.masked_fill(empty, NOT_THERE).to(torch.int8))
    return pools


@torch.inference_mode()
def rank_pools(chunk: LogChunk, pools: Pools, joint: Singles, num_kept: int) -> Ranked:
    """The `num_kept` best nodes of every pool, given each logged node's joint acceptance."""
    score, parts = torch.from_numpy(joint), []
    for node, depth in zip(pools.node, pools.depth, strict=True):
        prob = score[node.clamp(min=0)].masked_fill(node < 0, -1.0)
        order = top_order(prob, num_kept)
        on_path = chunk.on_path[node.clamp(min=0)] & (node >= 0)
        parts.append([values.gather(1, order) for values in (prob.clamp(min=0), depth, on_path)])
    columns = zip(*parts, strict=True)
    empty = (0.0, NOT_THERE, False)
    arrays: list[Any] = [
        _padded(c, num_kept, value) for c, value in zip(columns, empty, strict=True)
    ]
    return Ranked(chunk.positions, pools.width, *arrays)


def _padded(parts: Sequence[Tensor], num_kept: int, empty: float) -> Any:
    """`[R, num_kept]`: all rows, small pools filled up."""
    whole = torch.cat(list(parts))
    short = num_kept - whole.shape[1]
    return torch.nn.functional.pad(whole, (0, short), value=empty).numpy()


def _drafted(pools: Sequence[Pools], num_nodes: int) -> Bools:
    """`[T]`: some pool holds the node, or would as a root."""
    wanted = np.zeros(num_nodes + 1, np.bool_)
    for pool in pools:
        for node in pool.node:
            wanted[node.numpy()] = True  # -1 lands in the spare last place
    return wanted[:-1]


def _joined(parts: list[Ranked]) -> Ranked:
    positions = join_positions([part.positions for part in parts])
    columns = ([getattr(p, name) for p in parts] for name in ("prob", "depth", "on_path"))
    return Ranked(positions, parts[0].width, *(np.concatenate(column) for column in columns))
