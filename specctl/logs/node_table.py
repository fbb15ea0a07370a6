"""Every node of a chunk as plain columns, and the labelled nodes of a log."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from specctl.lazy import torch
from specctl.logs.positions import Bools, Ints, Longs, Singles, join_rows
from specctl.logs.row_checks import RowError, broken_rows
from specctl.logs.tree_log import ENTROPIES, DenseLog, LogChunk, map_chunks
from specctl.policy.budgets import draft_log_odds

TABLE_COLUMNS = (
    *("parent_idx", "depth", "sibling_rank", "joint_logp"),
    *("target_logp", "target_entropy", "target_margin"),
    *ENTROPIES,
)
"""Columns of the table to read as `extra`."""


@dataclass(frozen=True)
class NodeTable:
    """M logged nodes, roots among them; arrays `[M]`."""

    row: Longs  # position within the chunk; -1 for requests that were left out
    parent: Longs  # index into the table, -1 at roots
    # depth, rank: levels from the root; 0-based among siblings
    depth: Ints
    rank: Ints
    # draft_logp, joint_logp, entropy, topk_entropy: nats; entropies at the parent
    draft_logp: Singles
    joint_logp: Singles
    entropy: Singles
    topk_entropy: Singles
    target_logp: Singles  # nats, the target's; NaN if the parent is off the path
    # root_target_entropy, root_target_margin: nats, of the target's distribution after the root
    root_target_entropy: Singles
    root_target_margin: Singles
    on_path: Bools  # the path is a prefix of the text
    known: Bools  # `on_path` is known
    labelled: Bools  # the parent is on the path and `on_path` is known; false at roots

    def take(self, chosen: Bools | Longs) -> NodeTable:
        """Some nodes; their `parent` still indexes this table."""
        return NodeTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def features(self, names: tuple[str, ...]) -> Singles:
        """`[M, F]` float32 of columns, `log_odds` (of the draft probability) and `log_rank` (of the
        1-based rank)."""
        return np.stack([self._feature(name) for name in names], 1)

    def _feature(self, name: str) -> Singles:
        if name == "log_odds":
            return draft_log_odds(torch.from_numpy(self.draft_logp)).float().numpy()
        if name == "log_rank":
            return np.log1p(self.rank).astype(np.float32)
        found: Singles = getattr(self, name).astype(np.float32)
        return found


def node_table(chunk: LogChunk) -> NodeTable:
    """Every node of a chunk of a dense log.

    Args:
        chunk: read with `TABLE_COLUMNS`.

    Raises:
        TraceCorruptError: depth, rank or path log-probability of a node contradict its parent's.
    """
    root, extra = chunk.root.numpy(), chunk.extra
    begins = np.flatnonzero(extra["parent_idx"] < 0)
    sizes, row_of = np.diff(begins, append=chunk.num_nodes), np.full(len(begins), -1)
    row_of[np.searchsorted(begins, root)] = np.arange(len(root))
    row = np.repeat(row_of, sizes)
    parent = np.where(extra["parent_idx"] < 0, -1, extra["parent_idx"] + np.repeat(begins, sizes))
    on_path, known = chunk.on_path.numpy(), chunk.known.numpy()
    first, logp, joint = chunk.first_child.numpy(), chunk.draft_logp.numpy(), extra["joint_logp"]
    node = np.flatnonzero(parent >= 0)
    up, depth = parent[node], extra["depth"]
    if not (
        np.array_equal(depth[node], depth[up] + 1)
        and np.array_equal(extra["sibling_rank"][node], node - first[up])
        and np.allclose(joint[node], joint[up] + logp[node], rtol=1e-4, atol=1e-4)
        and not (depth[root].any() or joint[root].any())
    ):
        raise broken_rows("nodes", RowError("depths, ranks or joint_logp contradict the tree"))
    below = np.maximum(first[root], 0)  # first children hold the target's values at the root
    return NodeTable(
        row=row,
        parent=parent,
        depth=depth.astype(np.int32),
        rank=extra["sibling_rank"].astype(np.int32),
        draft_logp=logp,
        joint_logp=joint,
        entropy=chunk.entropy.numpy(),
        topk_entropy=chunk.topk_entropy.numpy(),
        target_logp=extra["target_logp"],
        root_target_entropy=extra["target_entropy"][below][row],
        root_target_margin=extra["target_margin"][below][row],
        on_path=on_path,
        known=known,
        labelled=(row >= 0) & (parent >= 0) & on_path[parent] & known,
    )


@dataclass(frozen=True)
class LabelledNodes:
    """Nodes that the text speaks about."""

    nodes: NodeTable  # M of them, all `labelled`
    prompt: Any  # `[M]` text, their prompts
    prompt_ids: tuple[str, ...]  # of the log


def labelled_nodes(log: DenseLog) -> LabelledNodes:
    """Every labelled node of a log, in its order."""

    def work(chunk: LogChunk) -> tuple[NodeTable, Any, tuple[str, ...]]:
        nodes, prompts = node_table(chunk), chunk.positions.row_prompts
        found = nodes.take(nodes.labelled)
        return found, prompts[found.row], tuple(dict.fromkeys(prompts))

    parts = list(map_chunks(log, work, TABLE_COLUMNS))
    tables, prompts, names = zip(*parts, strict=True)
    ids = tuple(dict.fromkeys(name for of in names for name in of))
    return LabelledNodes(join_rows(tables), np.concatenate(prompts), ids)
