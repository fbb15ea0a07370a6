"""A log whose target is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specctl.logs.node_table import node_table
from specctl.logs.tree_log import DenseLog, LogChunk


@dataclass(frozen=True)
class TargetLog(DenseLog):
    """The log with the target's law, which of these random trees is the drafter's own.

    Attributes:
        forgotten: leave the law out at depth 1. without_path: prompts whose text leaves every
            tree at once.
    """

    forgotten: bool = False
    without_path: frozenset[str] = frozenset()

    def chunks(self, **options: Any) -> Iterator[LogChunk]:
        for chunk in super().chunks(**options):
            cut = self._cut(chunk)
            yield replace(cut, extra=self._law(cut)) if chunk.extra else cut

    def _law(self, chunk: LogChunk) -> dict[str, Any]:
        nodes = node_table(chunk)
        seen = (nodes.parent >= 0) & nodes.on_path[nodes.parent]
        law = np.where(seen & (not self.forgotten), nodes.draft_logp, np.nan)
        return chunk.extra | {"target_logp": law.astype(np.float32)}

    def _cut(self, chunk: LogChunk) -> LogChunk:
        positions = chunk.positions
        names = np.array(positions.prompt_ids)[positions.prompt][positions.request]
        gone = np.isin(names, sorted(self.without_path))
        sizes = np.diff(chunk.root.numpy(), append=chunk.num_nodes)
        on_path = chunk.on_path.clone()
        on_path[np.repeat(gone, sizes)] = False
        on_path[chunk.root] = True
        return replace(chunk, on_path=on_path, matched=np.where(gone, 0, chunk.matched))


def target_log(log: DenseLog, **options: Any) -> TargetLog:
    return TargetLog(log.support, log.digest, log.files, **options)
