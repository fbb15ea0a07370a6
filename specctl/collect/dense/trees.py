"""What P growing trees remember: who sees whom, and the keys and values of their nodes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specctl.collect.dense.attention import Nodes, Prefix, merged_attention
from specctl.runtime.cache import SlotCache

Attention = Callable[[Tensor, Prefix, Nodes, float], Tensor]


class TreeMemory:
    """Keys and values of the trees of P positions, over one slot of read text.

    Args:
        cache: holds the text in its first slot.
        stable: entries of the text that each tree sees: `stable` .. `stable + P - 1`.
        attention: `merged_attention`, or `exact_attention` to check it.
    """

    def __init__(
        self, cache: SlotCache, stable: range, attention: Attention = merged_attention
    ) -> None:
        assert cache.storage is not None, "the text is read first"
        self.level = 0
        self._text = cache.storage[:, 0, :, : stable.stop - 1]
        self._first, self._attention = stable.start, attention
        self._stable = torch.arange(stable.start, stable.stop, device=self._text.device)
        self._nodes: list[Nodes | None] = [None] * cache.num_layers
        self._seen: Tensor | None = None

    def descend(self, parent_slot: Tensor) -> None:
        """Starts a level below `parent_slot` `[P, W]`, columns of the level before."""
        rows, width = parent_slot.shape
        own = torch.eye(width, dtype=torch.bool, device=parent_slot.device).expand(rows, -1, -1)
        if self._seen is not None:
            index = parent_slot[..., None].expand(-1, -1, self._seen.shape[2])
            own = torch.cat([self._seen.gather(1, index), own], 2)
        self._seen = own
        self.level += 1

    def positions(self, width: int) -> Tensor:
        """`[P, W]` positions of the nodes of the present level (see `runtime.drafter`)."""
        return (self._stable + self.level - 1)[:, None].expand(-1, width)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None
    ) -> Tensor:
        """Adds the level's keys and values `[P, Hkv, W, D]` to a layer; `[P, Hq, W, D]`."""
        assert self._seen is not None, "descend() comes first"
        before = self._nodes[layer]
        if before is not None:
            key, value = torch.cat([before.keys, key], 2), torch.cat([before.values, value], 2)
        nodes = self._nodes[layer] = Nodes(key, value, self._seen)
        prefix = Prefix(self._text[2 * layer], self._text[2 * layer + 1], self._stable, self._first)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self._attention(query, prefix, nodes, scaling)
