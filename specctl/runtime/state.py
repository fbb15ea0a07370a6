"""State of the requests in slots, at fixed addresses on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.errors import InvariantError
from specctl.runtime.requests import Sampling
from specctl.runtime.sampling import SamplingTable

COLUMNS = ("prefix", "stable", "positions", "root_ids")
"""The first three advance by the tokens that a round commits."""


@dataclass(frozen=True)
class SlotFacts:
    """The host's state of one request."""

    root_id: int  # last committed token
    prefix: int  # entries in the target's cache: the text without the root
    stable: int  # entries that the drafter has read
    position: int  # tokens emitted
    sampling: Sampling


class Rows(NamedTuple):
    """`[B]` int64 columns of the first B slots; see `SlotFacts`."""

    advancing: Tensor  # `[3, B]`: prefix, stable and positions
    prefix: Tensor
    stable: Tensor
    positions: Tensor
    root_ids: Tensor
    vacant: Tensor  # `[B]` bool, rows without a request

    def advance(self, root_ids: Tensor, counts: Tensor) -> None:
        """Advances the rows by a round that committed `counts` `[B]` tokens."""
        self.root_ids.copy_(root_ids)
        self.advancing.add_(counts)


class SlotState:
    """Columns of all slots, advanced on the device."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots, self.device = num_slots, device
        size = (len(COLUMNS), num_slots)
        self.integers = torch.zeros(size, dtype=torch.int64, device=device)
        self.vacant = torch.ones(num_slots, dtype=torch.bool, device=device)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.samplings = SamplingTable.of([], device)
        self._rows: dict[int, Rows] = {}

    def upload(self, facts: Sequence[SlotFacts]) -> None:
        """Sets the first rows and empties the others, in stream order.

        The outcome of the last round must have been read, as it may still use the old upload.
        """
        if len(facts) > self.num_slots:
            raise InvariantError(
                f"decode round: {len(facts)} requests for {self.num_slots} slots",
                hint="report this: the loop admits no more than it allocated for",
            )
        self._host.zero_()
        columns = [[of.prefix, of.stable, of.position, of.root_id] for of in facts]
        self._host[:, : len(facts)] = torch.tensor(columns, dtype=torch.int64).view(-1, 4).T
        self.integers.copy_(self._host, non_blocking=True)
        self.vacant.fill_(True)
        self.vacant[: len(facts)].fill_(False)
        # Rows of a bucket without a request are greedy.
        padding = [Sampling()] * (self.num_slots - len(facts))
        self.samplings = SamplingTable.of([*(of.sampling for of in facts), *padding], self.device)

    def rows(self, num_rows: int) -> Rows:
        """Views of the first rows, cached."""
        if num_rows not in self._rows:
            columns, vacant = self.integers[:, :num_rows], self.vacant[:num_rows]
            prefix, stable, positions, root_ids = columns
            self._rows[num_rows] = Rows(columns[:3], prefix, stable, positions, root_ids, vacant)
        return self._rows[num_rows]


class SlotMemory:
    """One rule's memory of each request, `[slots, M]` float64, initially zero."""

    def __init__(self, num_slots: int, size: int, device: torch.device) -> None:
        self._rows = torch.zeros(num_slots, size, dtype=torch.float64, device=device)

    def join(self, slot: int) -> None:
        """Clears a slot for a new request."""
        self._rows[slot] = 0

    def read(self, num_rows: int) -> Tensor:
        """`[B, M]` of the first B slots."""
        return self._rows[:num_rows]

    def write(self, memory: Tensor) -> None:
        """Sets the first B slots to `[B, M]`."""
        self._rows[: len(memory)] = memory

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]


class HostCopy:
    """Copies a small tensor to pinned memory on a stream of its own.

    Attributes:
        num_waits: number of reads, each of which waits.
    """

    def __init__(self, like: Tensor) -> None:
        self._on_cuda, self.num_waits = like.is_cuda, 0
        self._host = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._on_cuda)
        if self._on_cuda:
            self._stream, self._ready = torch.cuda.Stream(like.device), torch.cuda.Event()

    def post(self, values: Tensor) -> None:
        """Starts a copy of the values behind the work launched so far.

        They must stay unchanged until `read`.
        """
        if not self._on_cuda:
            self._host.copy_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(values, non_blocking=True)
            self._ready.record(self._stream)

    def read(self) -> Tensor:
        """Waits for the last post and returns its values, which the next one overwrites."""
        if self._on_cuda:
            self._ready.synchronize()
        self.num_waits += 1
        return self._host
