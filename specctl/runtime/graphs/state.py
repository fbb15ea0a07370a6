"""What the device knows of the requests in slots: one row of numbers each, at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.noise import signed_seed
from specctl.runtime.observe import Sampling

INTEGERS = ("prefix", "stable", "positions", "root_ids", "seeds", "top_k", "vacant", "greedy")
ADVANCING = slice(0, 3)
"""Those that a round moves by the tokens that it committed."""
NUMBERS = ("temperature", "top_p")
VACANT = [0] * (len(INTEGERS) - 2) + [1, 0]
"""The integers of a row without a request."""


@dataclass(frozen=True)
class SlotFacts:
    """What the host knows of one request.

    Attributes:
        root_id: last committed token. prefix: text length without it, entries in the target's
            cache. stable: entries that the drafter has read. position: tokens emitted.
    """

    root_id: int
    prefix: int
    stable: int
    position: int
    sampling: Sampling


class SlotState:
    """`[S]` columns of all slots; rounds advance them on the device.

    Attributes:
        integers: `[8, S]` int64, by `INTEGERS`. numbers: `[2, S]` float64, by `NUMBERS`.
        flags: `[2, S]` bool, the last two of the integers.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots, on_cuda = num_slots, device.type == "cuda"
        self.integers = torch.zeros(len(INTEGERS), num_slots, dtype=torch.int64, device=device)
        self.numbers = torch.ones(len(NUMBERS), num_slots, dtype=torch.float64, device=device)
        self.flags = torch.zeros(2, num_slots, dtype=torch.bool, device=device)
        self._integers, self._numbers = (
            torch.zeros_like(table, device="cpu", pin_memory=on_cuda)
            for table in (self.integers, self.numbers)
        )

    def upload(self, facts: Sequence[SlotFacts]) -> None:
        """Sets the first rows and empties the others, in stream order.

        Not while a round whose outcome was not read yet may still read the last upload.
        """
        empty = self.num_slots - len(facts)
        integers = [_integers(of) for of in facts] + [VACANT] * empty
        numbers = [_numbers(of.sampling) for of in facts] + [[1.0, 1.0]] * empty
        self._integers.copy_(torch.tensor(integers).T)
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64).T)
        self.integers.copy_(self._integers, non_blocking=True)
        self.numbers.copy_(self._numbers, non_blocking=True)
        self.flags.copy_(self.integers[-2:])

    def rows(self, num_rows: int) -> Rows:
        """Views of the first rows."""
        columns = dict(zip(INTEGERS, self.integers[:, :num_rows], strict=True))
        columns |= dict(zip(NUMBERS, self.numbers[:, :num_rows], strict=True))
        columns |= dict(zip(INTEGERS[-2:], self.flags[:, :num_rows], strict=True))
        return Rows(self.integers[ADVANCING, :num_rows], **columns)


class Rows(NamedTuple):
    """`[B]` columns of the first B slots, int64 unless said otherwise; see `SlotFacts`.

    Attributes:
        advancing: `[3, B]`, prefix, stable and positions together.
        seeds: of the requests' streams. top_k: 0 keeps all tokens.
        vacant: bool, rows without a request. greedy: bool, rows that take the likeliest token.
        temperature: float64, 1 in greedy rows. top_p: float64.
    """

    advancing: Tensor
    prefix: Tensor
    stable: Tensor
    positions: Tensor
    root_ids: Tensor
    seeds: Tensor
    top_k: Tensor
    vacant: Tensor
    greedy: Tensor
    temperature: Tensor
    top_p: Tensor

    def advance(self, root_ids: Tensor, counts: Tensor) -> None:
        """After a round that committed `counts` `[B]` tokens, the last of them the new root."""
        self.root_ids.copy_(root_ids)
        self.advancing.add_(counts)


def _integers(of: SlotFacts) -> list[int]:
    sampling, seed = of.sampling, signed_seed(of.sampling.seed)
    counts = [of.prefix, of.stable, of.position, of.root_id]
    return [*counts, seed, sampling.top_k, 0, int(sampling.greedy)]


def _numbers(sampling: Sampling) -> list[float]:
    return [1.0 if sampling.greedy else sampling.temperature, sampling.top_p]
