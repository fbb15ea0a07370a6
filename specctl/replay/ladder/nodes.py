"""Logged nodes as features: what an estimate of acceptance may look at."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.policy.calibration import draft_log_odds
from specctl.replay.log import LogChunk, Support
from specctl.replay.positions import Bools, Ints, Longs

Singles = NDArray[np.float32]
TARGET_COLUMNS = ("target_logp", "target_entropy", "target_margin")
DRAFTER_FEATURES = ("log_odds", "entropy", "depth", "log_rank")
"""What a drafter knows of a node: log-odds of its probability (nats), full entropy of the
distribution that it comes from (nats), its depth, log of its 1-based rank among its siblings."""
ORACLE_FEATURES = (
    *DRAFTER_FEATURES,
    "topk_entropy",
    "joint_logp",
    "root_target_entropy",
    "root_target_margin",
)
"""The same with the path's log-probability and how sure the target is at the root: the entropy
(nats) and top-2 margin (nats) of the law that verifies depth 1, which no policy can know."""


@dataclass(frozen=True)
class NodeTable:
    """M logged nodes, roots among them; arrays `[M]`.

    Attributes:
        row: position within the chunk. parent: index into the table, -1 at roots.
        depth, rank: levels from the root; 0-based among siblings.
        draft_logp, joint_logp, entropy, topk_entropy: nats; entropies at the parent.
        target_logp: nats, the target's, NaN where its parent is off the path.
        root_target_entropy, root_target_margin: nats, of the target's law after the root.
        on_path: the path is a prefix of the continuation.
        told: the parent is on the path and the text is long enough to tell.
    """

    row: Longs
    parent: Longs
    depth: Ints
    rank: Ints
    draft_logp: Singles
    joint_logp: Singles
    entropy: Singles
    topk_entropy: Singles
    target_logp: Singles
    root_target_entropy: Singles
    root_target_margin: Singles
    on_path: Bools
    told: Bools

    def take(self, chosen: Bools | Longs) -> NodeTable:
        """Some nodes; their `parent` keeps pointing into this table."""
        return NodeTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def features(self, names: tuple[str, ...]) -> Singles:
        """`[M, F]` float32."""
        return np.stack([self._feature(name) for name in names], 1)

    def _feature(self, name: str) -> Singles:
        if name == "log_odds":
            return draft_log_odds(torch.from_numpy(self.draft_logp)).float().numpy()
        if name == "log_rank":
            return np.log1p(self.rank).astype(np.float32)
        found: Singles = getattr(self, name).astype(np.float32)
        return found


def join_tables(parts: list[NodeTable]) -> NodeTable:
    """All nodes of all parts; `row` and `parent` keep their own chunks' meaning."""
    return NodeTable(
        *(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(NodeTable))
    )


def node_table(chunk: LogChunk, support: Support) -> NodeTable:
    """Every node of a chunk that was read with `TARGET_COLUMNS`."""
    root, first = chunk.root.numpy(), chunk.first_child.numpy()
    row = np.repeat(np.arange(len(root)), np.diff(root, append=chunk.num_nodes))
    logp, on_path = chunk.draft_logp.numpy(), chunk.on_path.numpy()
    parent, depth, rank, joint = _structure(root, first, logp, support)
    told = (parent >= 0) & on_path[parent] & (depth <= chunk.positions.remaining[row])
    below = np.maximum(first[root], 0)  # a child of the root carries the law after the root
    return NodeTable(
        row=row,
        parent=parent,
        depth=depth,
        rank=rank,
        draft_logp=logp,
        joint_logp=joint,
        entropy=chunk.entropy.numpy(),
        topk_entropy=chunk.topk_entropy.numpy(),
        target_logp=chunk.extra["target_logp"],
        root_target_entropy=chunk.extra["target_entropy"][below][row],
        root_target_margin=chunk.extra["target_margin"][below][row],
        on_path=on_path,
        told=told,
    )


def _structure(
    root: Longs, first: Longs, logp: Singles, support: Support
) -> tuple[Longs, Ints, Ints, Singles]:
    """Parents, depths, sibling ranks and path log-probabilities, a level at a time."""
    parent = np.full(len(first), -1, np.int64)
    depth, rank = np.zeros(len(first), np.int32), np.zeros(len(first), np.int32)
    joint, level = np.zeros(len(first), np.float32), root
    for levels in range(1, support.depth + 1):
        above = level[first[level] >= 0]
        children = first[above][:, None] + np.arange(support.top_k)
        rank[children] = np.arange(support.top_k)
        parent[children] = above[:, None]
        joint[children] = joint[above][:, None] + logp[children]
        level = children.ravel()
        depth[level] = levels
    return parent, depth, rank, joint
