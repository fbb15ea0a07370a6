"""The tensors that `bookkeeping` reads and fills."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specctl.kernels.checks import require_at_least, require_dense, require_tensor

FACTS = ("count", "num_verified", "num_levels", "faulty", "finite", "wanted")
"""Columns of an outcome before its tokens, int64 each."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Opened(NamedTuple):
    """The nodes that a drafter evaluates next, buffers `[B, W]` written in place.

    Attributes:
        slots: int64, in the pool. keep: bool, whether it is expanded at all.
        token_ids, parent, position_ids, place: int64; `parent` is a column of the level before,
            `place` an entry of the row's slot.
        words: `[B, W, words]` int32, the evaluated nodes that each sees, itself included.
    """

    slots: Tensor
    keep: Tensor
    token_ids: Tensor
    parent: Tensor
    position_ids: Tensor
    place: Tensor
    words: Tensor

    def check(self, op: str, num_rows: int) -> None:
        """Refuses what does not fit a batch."""
        shape: tuple[int | None, ...] = (num_rows, None)
        for name, column in zip(self._fields[:-1], self[:-1], strict=True):
            dtype = torch.bool if name == "keep" else torch.int64
            require_tensor(op, f"opened.{name}", column, shape, dtype)
            require_dense(op, f"opened.{name}", column, self.slots)
            shape = tuple(self.slots.shape)
        require_tensor(op, "opened.words", self.words, (*shape, None), torch.int32)
        require_dense(op, "opened.words", self.words)


class Laid(NamedTuple):
    """T places for the nodes of B trees.

    Attributes:
        offsets: `[B + 1]` int64: where each row's nodes start, and the end of the last.
        row, place, token_ids, position_ids, positions: `[T]` int64; `positions` counts output
            tokens, `position_ids` text.
        words: `[T, words]` int32. node_at: `[B, N]` int64, place of each node on the axis.
    """

    offsets: Tensor
    row: Tensor
    place: Tensor
    token_ids: Tensor
    position_ids: Tensor
    positions: Tensor
    words: Tensor
    node_at: Tensor


class Walked(NamedTuple):
    """What a verification found of B trees of N nodes, T places.

    Attributes:
        path, token_ids: `[B, D + 1]` int64, of `walk_tree`. num_nodes: `[B]` int64.
        node_at: `[B, N]` int64. offsets: `[B + 1]` int64. best: `[T]`, largest logit of each.
        parent, depth: `[B, P]` int64, of the pool. submitted: `[B, M]` int64, before any cut.
        faulty: `[B]` bool. stable: `[B]` int64.
    """

    path: Tensor
    token_ids: Tensor
    num_nodes: Tensor
    node_at: Tensor
    offsets: Tensor
    best: Tensor
    parent: Tensor
    depth: Tensor
    submitted: Tensor
    faulty: Tensor
    stable: Tensor

    def check(self, op: str) -> None:
        """Refuses parts that do not fit each other."""
        require_tensor(op, "path", self.path, (None, None), torch.int64)
        rows, steps = self.path.shape
        shapes: dict[str, tuple[int | None, ...]] = {
            "path": (rows, steps),
            "token_ids": (rows, steps),
            "num_nodes": (rows,),
            "node_at": (rows, None),
            "offsets": (rows + 1,),
            "parent": (rows, None),
            "depth": tuple(self.parent.shape),
            "submitted": (rows, None),
            "stable": (rows,),
        }
        for name, shape in shapes.items():
            require_tensor(op, name, getattr(self, name), shape, torch.int64)
        require_tensor(op, "best", self.best, (None,), *FLOATS)
        require_tensor(op, "faulty", self.faulty, (rows,), torch.bool)
        for name in ("path", "node_at", "parent", "best"):
            require_at_least(op, f"entries of {name}", getattr(self, name).shape[-1], 1)


class Settled(NamedTuple):
    """Buffers of at least B rows, int64.

    Attributes:
        outcome: `[B, facts + D + 1]`: `FACTS`, then emitted tokens, -1 padded: what the host reads.
        path: `[B, D + 1]`, of the walk. path_at: places of its nodes on the packed axis.
        read_ids, read_positions, read_place: `[B, D + 1]`, for the drafter to read the emitted
            text; its padding is token 0.
        last: `[B]` column of the last emitted token. next_root: `[B]` that token.
    """

    outcome: Tensor
    path: Tensor
    path_at: Tensor
    read_ids: Tensor
    read_positions: Tensor
    read_place: Tensor
    last: Tensor
    next_root: Tensor

    def check(self, op: str, num_rows: int, steps: int) -> None:
        """Refuses buffers that are too small."""
        rows = max(num_rows, len(self.outcome))
        for name in self._fields:
            is_column, facts = name in ("last", "next_root"), len(FACTS) * (name == "outcome")
            buffer, shape = getattr(self, name), (rows,) if is_column else (rows, facts + steps)
            require_tensor(op, f"settled.{name}", buffer, shape, torch.int64)
            require_dense(op, f"settled.{name}", buffer, None if facts or is_column else self.path)


def new_opened(num_slots: int, width: int, num_words: int, device: torch.device) -> Opened:
    """Buffers of so many rows."""
    integers = torch.zeros(5, num_slots, width, dtype=torch.int64, device=device)
    slots, token_ids, parent, position_ids, place = integers
    keep = torch.zeros(num_slots, width, dtype=torch.bool, device=device)
    words = torch.zeros(num_slots, width, num_words, dtype=torch.int32, device=device)
    return Opened(slots, keep, token_ids, parent, position_ids, place, words)


def new_settled(num_slots: int, steps: int, device: torch.device) -> Settled:
    """Buffers of so many rows."""
    outcome = torch.zeros(num_slots, len(FACTS) + steps, dtype=torch.int64, device=device)
    tables = torch.zeros(5, num_slots, steps, dtype=torch.int64, device=device)
    columns = torch.zeros(2, num_slots, dtype=torch.int64, device=device)
    return Settled(outcome, *tables, *columns)
