"""Copies of tensors from a device to the host, without a wait in the decoding thread.

    decoding stream   round ── mark ── round ── mark ── ...        no wait here
                                └─► side stream   statistics ─ pack ─ copy ─ event
                                                                      │        │
    background thread                                   host memory ◄─┘ read ◄─┘

A `Lane` hides the differences between devices. On a CPU the same code runs with plain memory and
events that are ready at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

C = TypeVar("C")
"""The sender's note on a parcel."""


class Event(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Waits until the device has reached it."""


class Ready:
    """The event of a CPU, whose work is done when a call returns."""

    def synchronize(self) -> None:
        return None


class Lane:
    """The lane of tensors that are on the host already; base of other devices' lanes.

    `mark` runs on the thread that makes the tensors, the rest on the thread that copies them.
    """

    overlaps = False  # whether device and host work at the same time

    def mark(self) -> Event:
        """A point after all work that this thread has enqueued so far; returns at once."""
        return Ready()

    @contextmanager
    def after(self, marks: Sequence[Event]) -> Iterator[None]:
        """Inside the block, work is enqueued beside that of the other thread, after these marks.

        Its tensors must not be freed or written before the event of its last `copy`.
        """
        del marks
        yield

    def host_bytes(self, size_bytes: int) -> Tensor:
        """Uninitialised uint8 memory that the device can copy to."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        """Copies to host memory, inside `after`; the event marks the end of the copy."""
        target.copy_(source)
        return Ready()


class CudaLane(Lane):
    """A side stream of one CUDA device, and pinned host memory, which torch keeps for reuse."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)

    def mark(self) -> Event:
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event

    @contextmanager
    def after(self, marks: Sequence[Event]) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            for mark in marks:
                self._side.wait_event(cast(torch.cuda.Event, mark))
            yield

    def host_bytes(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        target.copy_(source, non_blocking=True)
        # A blocking event lets the waiting thread sleep; others spin on a core.
        event = torch.cuda.Event(blocking=True)
        event.record(self._side)
        return event


def lane_for(device: torch.device) -> Lane:
    """The lane of a device."""
    return CudaLane(device) if device.type == "cuda" else Lane()


class Field(NamedTuple):
    """One tensor of a parcel."""

    name: str
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class Parcel(Generic[C]):
    """Tensors on their way to the host."""

    context: C
    fields: list[Field]
    packed: Tensor  # their bytes on the host, valid after `event`
    event: Event
    sources: tuple[Tensor, ...]  # keeps the tensors that the device reads until `event`


class Transfer(Generic[C]):
    """Sends named tensors over a lane, in order. For one thread."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._under_way: deque[Parcel[C]] = deque()

    def send(self, tensors: Mapping[str, Tensor], context: C) -> None:
        """Starts to copy one parcel, inside the lane's `after`.

        Args:
            tensors: kept by this object, and not to be written, until they have landed.
        """
        packed, fields = pack(tensors)
        target = self.lane.host_bytes(packed.nbytes)
        event = self.lane.copy(target, packed)
        sources = (packed, *tensors.values())
        self._under_way.append(Parcel(context, fields, target, event, sources))

    def land(self) -> list[tuple[C, dict[str, Tensor]]]:
        """Waits for all parcels; their contexts and tensors in plain memory, in order."""
        landed = []
        while self._under_way:
            parcel = self._under_way[0]
            parcel.event.synchronize()
            tensors = unpack(parcel.packed.clone(), parcel.fields)  # pinned memory is scarce
            landed.append((parcel.context, tensors))
            self._under_way.popleft()
        return landed


def pack(tensors: Mapping[str, Tensor]) -> tuple[Tensor, list[Field]]:
    """The bytes of all tensors in a row, the widest types first for alignment.

    Returns:
        `[bytes]` uint8 on their device, and the fields in the order of the bytes.
    """
    named = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    # `contiguous` leaves a tensor of one element with any stride, and `view` wants 1.
    flat = (tensor.contiguous().as_strided((tensor.numel(),), (1,)) for _, tensor in named)
    parts = [tensor.view(torch.uint8) for tensor in flat]
    return torch.cat(parts), [Field(name, t.dtype, t.shape) for name, t in named]


def unpack(data: Tensor, fields: Sequence[Field]) -> dict[str, Tensor]:
    """Views of packed bytes."""
    parts = data.split([math.prod(field.shape) * field.dtype.itemsize for field in fields])
    return {
        field.name: part.view(field.dtype).view(field.shape)
        for field, part in zip(fields, parts, strict=True)
    }
