"""Named tensors of a device to named tensors of the host, in one copy, in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specctl.collect.transfer.buffers import BufferPool
from specctl.collect.transfer.lanes import Event, Lane

C = TypeVar("C")
"""What the sender wants to know again when a parcel arrives."""


class Field(NamedTuple):
    """One tensor of a parcel."""

    name: str
    dtype: torch.dtype
    shape: torch.Size


class Landed(NamedTuple, Generic[C]):
    """What arrived: the context it was sent with, and its tensors in plain memory."""

    context: C
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Parcel(Generic[C]):
    """On its way.

    Attributes:
        sources: what the device still reads; kept until `event`.
    """

    context: C
    fields: list[Field]
    buffer: Tensor
    event: Event
    sources: tuple[Tensor, ...]


class Shipping(Generic[C]):
    """Sends tensors over a lane through a bounded pool of buffers. Used by one thread.

    Args:
        max_bytes: of the pool.
    """

    def __init__(self, lane: Lane, max_bytes: int) -> None:
        self.lane, self.pool = lane, BufferPool(lane.host_bytes, max_bytes)
        self._under_way: deque[Parcel[C]] = deque()

    def send(self, tensors: Mapping[str, Tensor], context: C) -> list[Landed[C]]:
        """Starts one parcel, inside the lane's `after`.

        Args:
            tensors: neither freed nor written until they landed; this object keeps them.

        Returns:
            what it had to wait for because the pool had no room.
        """
        packed, fields = pack(tensors)
        landed = []
        while (buffer := self.pool.take(packed.nbytes)) is None:
            landed.append(self._land())
        event = self.lane.copy(buffer[: packed.nbytes], packed)
        sources = (packed, *tensors.values())
        self._under_way.append(Parcel(context, fields, buffer, event, sources))
        return landed

    def land(self, num_left: int = 0) -> list[Landed[C]]:
        """Waits until at most `num_left` parcels are under way; what arrived, in order."""
        return [self._land() for _ in range(len(self._under_way) - num_left)]

    def _land(self) -> Landed[C]:
        parcel = self._under_way[0]
        parcel.event.synchronize()
        size_bytes = sum(field_bytes(field) for field in parcel.fields)
        tensors = unpack(parcel.buffer[:size_bytes].clone(), parcel.fields)
        self._under_way.popleft()
        self.pool.give(parcel.buffer)
        return Landed(parcel.context, tensors)


def pack(tensors: Mapping[str, Tensor]) -> tuple[Tensor, list[Field]]:
    """All tensors as bytes behind one another, and what is where.

    The widest types come first, so that every tensor stands aligned without padding.

    Returns:
        `[bytes]` uint8 on their device, and the fields in the order of the bytes.
    """
    named = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in named]
    return torch.cat(parts), [Field(name, t.dtype, t.shape) for name, t in named]


def unpack(data: Tensor, fields: list[Field]) -> dict[str, Tensor]:
    """Views of packed bytes."""
    sizes = [field_bytes(field) for field in fields]
    return {
        field.name: part.view(field.dtype).view(field.shape)
        for field, part in zip(fields, data.split(sizes), strict=True)
    }


def field_bytes(field: Field) -> int:
    """Size of one tensor."""
    return math.prod(field.shape) * field.dtype.itemsize
