"""What drafters keep of the requests in slots, within a round and between rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class TreeState:
    """Who sees whom among the nodes of the current round.

    Attributes:
        level: levels evaluated so far.
        seen: `[A, W, M]` bool, the M nodes so far that each node of the last level sees.
    """

    level: int = 0
    seen: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """M, whatever the widths of the levels."""
        return 0 if self.seen is None else self.seen.shape[2]

    def descend(self, parent_slot: Tensor) -> Tensor:
        """Adds a level below `parent_slot` `[A, W]`; `[A, W, M + W]` visibility of its nodes."""
        rows, width = parent_slot.shape
        own = torch.eye(width, dtype=torch.bool, device=parent_slot.device).expand(rows, -1, -1)
        if self.seen is None:
            self.seen = own
        else:
            index = parent_slot[..., None].expand(-1, -1, self.seen.shape[2])
            self.seen = torch.cat([self.seen.gather(1, index), own], 2)
        self.level += 1
        return self.seen


@dataclass
class DraftSlots:
    """What a drafter remembers per slot between rounds.

    Attributes:
        stable: text tokens read, hence KV entries that stay.
        root: `[slots, ·]`, what the next round starts from: the output at the last token read.
    """

    stable: list[int]
    root: Tensor | None = None

    def keep_root(self, first_slot: int, values: Tensor) -> None:
        """Stores `[A, ·]` from `first_slot` on."""
        if self.root is None:
            self.root = values.new_zeros(len(self.stable), values.shape[-1])
        self.root[first_slot : first_slot + len(values)] = values

    def advance(self, counts: list[int]) -> list[int]:
        """Moves the stable ends of the first rows; returns where they were."""
        before = self.stable[: len(counts)]
        for row, count in enumerate(counts):
            self.stable[row] += count
        return before

    def roots(self, num_rows: int) -> Tensor:
        assert self.root is not None, "prefill() comes first"
        return self.root[:num_rows]

    def move(self, source: int, target: int) -> None:
        self.stable[target] = self.stable[source]
        if self.root is not None:
            self.root[target] = self.root[source]


def last_of(values: Tensor, counts: list[int]) -> Tensor:
    """`[A, ·]`: the entry of each row's last real token in `[A, T, ·]`."""
    last = torch.tensor(counts, device=values.device) - 1
    return values[torch.arange(len(counts), device=values.device), last]


def step_positions(offsets: list[int], token_ids: Tensor) -> Tensor:
    """`[A, T]` positions that continue each row from its offset."""
    steps = torch.arange(token_ids.shape[1], device=token_ids.device)
    return torch.tensor(offsets, device=token_ids.device)[:, None] + steps


def level_positions(offsets: list[int], level: int, token_ids: Tensor) -> Tensor:
    """`[A, W]` positions of the nodes of a level, 1-based, behind the stable prefixes."""
    starts = torch.tensor(offsets, device=token_ids.device) + (level - 1)
    return starts[:, None].expand_as(token_ids)
