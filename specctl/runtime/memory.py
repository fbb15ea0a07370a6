"""What rules remember of the requests in slots, kept for them from round to round."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import InvariantError
from specctl.runtime.runnable import Runnable


class SlotMemory:
    """One rule's memory, `[slots, M]` float64; a row is zero when a request joins."""

    def __init__(self, num_slots: int, size: int, device: torch.device) -> None:
        self._rows = torch.zeros(num_slots, size, dtype=torch.float64, device=device)

    def join(self, slot: int) -> None:
        """A new request stands in the slot."""
        self._rows[slot] = 0

    def read(self, num_rows: int) -> Tensor:
        """`[A, M]` of the first A slots."""
        return self._rows[:num_rows]

    def write(self, memory: Tensor) -> None:
        """The first A slots remember this from now on, `[A, M]`."""
        self._rows[: len(memory)] = memory

    def move(self, source: int, target: int) -> None:
        """Copies one slot over another."""
        self._rows[target] = self._rows[source]


def fresh_memories(rules: Runnable, num_slots: int, device: torch.device) -> list[SlotMemory]:
    """Empty ones of the shape and of the acceptance."""
    sizes = (rules.shape.memory_size, rules.acceptance.memory_size)
    return [SlotMemory(num_slots, size, device) for size in sizes]


def memory_taken() -> InvariantError:
    """The refusal to go on over another loop's memory."""
    return InvariantError(
        "decode loop",
        expected="the models' memory, which it allocated",
        found="that of another loop, begun on the same models since",
        fix="use one loop at a time, or load the pair twice",
    )
