"""A log whose target is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specctl.logs.node_table import TABLE_COLUMNS, node_table
from specctl.logs.tree_log import DenseLog, LogChunk


def target_log(
    log: DenseLog, *, forgotten: bool = False, without_path: frozenset[str] = frozenset()
) -> DenseLog:
    """The log with the target's distribution, which of these random trees is the drafter's own.

    Args:
        forgotten: leave the distribution out at depth 1.
        without_path: prompts whose text leaves every tree at once.
    """

    def known(chunk: LogChunk) -> LogChunk:
        gone = np.isin(chunk.positions.row_prompts.astype(str), sorted(without_path))
        sizes = np.diff(chunk.root.numpy(), append=chunk.num_nodes)
        on_path = chunk.on_path.clone()
        on_path[np.repeat(gone, sizes)] = False
        on_path[chunk.root] = True
        cut = replace(chunk, on_path=on_path, matched=np.where(gone, 0, chunk.matched))
        nodes = node_table(cut)
        seen = (nodes.parent >= 0) & nodes.on_path[nodes.parent] & (not forgotten)
        logp = np.where(seen, nodes.draft_logp, np.nan).astype(np.float32)
        return replace(cut, extra=chunk.extra | {"target_logp": logp})

    return replace(log, held=tuple(map(known, log.chunks(extra=TABLE_COLUMNS))))
