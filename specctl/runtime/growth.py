"""Children from a drafter: one forward a level. What grows by them stands in `policy.growing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specctl.features import ENTROPY_TOP_K
from specctl.kernels.node_features import node_features
from specctl.policy.growing import (
    Children,
    ChildSource,
    PoolBuffers,
    append_level,
    grow_tree,
    new_pool,
    pool_capacity,
)
from specctl.policy.rules import Frontier

if TYPE_CHECKING:  # brings transformers along, which replay does without
    from specctl.runtime.drafter import Drafter

__all__ = [
    "ChildSource",
    "Children",
    "DrafterSource",
    "PoolBuffers",
    "append_level",
    "grow_tree",
    "new_pool",
    "pool_capacity",
]


class DrafterSource:
    """Children from one drafter forward a level.

    Args:
        keep_logits: keep what the drafter said at every node, for `parent_logits`.
    """

    def __init__(self, drafter: Drafter, *, keep_logits: bool = False) -> None:
        self.drafter, self.keep_logits = drafter, keep_logits
        self._kept: list[Tensor] = []
        self._slot_column: list[Tensor] = []

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        logits = self._logits(pool, frontier, top_k)
        if self.keep_logits:
            self._keep(logits, top_k)
        found = node_features(logits, top_k, ENTROPY_TOP_K)
        token_ids = self.drafter.to_target_ids(found.top_ids)
        return Children(token_ids, found.top_logp, found.entropy, found.topk_entropy)

    def parent_logits(self, slots: Tensor) -> Tensor:
        """What the drafter said where pool slots were drawn: `[A, N, Vd]` of slots `[A, N]`.

        The root, and an empty slot, get those of the root's children.
        """
        logits = torch.cat(self._kept, 1)
        column = torch.cat([torch.zeros_like(self._slot_column[0][:1]), *self._slot_column])
        index = column[slots.clamp(min=0)][..., None]
        return logits.gather(1, index.expand(-1, -1, logits.shape[2]))

    def _keep(self, logits: Tensor, top_k: int) -> None:
        before = sum(kept.shape[1] for kept in self._kept)
        columns = torch.arange(logits.shape[1], device=logits.device) + before
        self._kept.append(logits)
        self._slot_column.append(columns.repeat_interleave(top_k))

    def _logits(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Tensor:
        if pool.level_start == 0:
            return self.drafter.begin_round(len(frontier.index))[:, None]
        below_root = pool.level_start == 1
        columns = (frontier.index - pool.level_start) // top_k
        parent_slot = torch.zeros_like(columns) if below_root else columns
        return self.drafter.expand(pool.token_ids.gather(1, frontier.index), parent_slot)
