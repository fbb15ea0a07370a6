"""From a device to the host without anyone waiting for the device.

    decoding stream   round ── mark ── round ── mark ── ...        nobody waits here
                                └─► side stream   statistics ─ pack ─ copy ─ event
                                                                      │        │
    background thread                              a buffer of the pool ◄──────┘ read, given back

A `Lane` holds all that differs between devices. On a CPU the same code runs, with plain memory and
events that are ready at once.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

log = logging.getLogger("specctl.collect")
C = TypeVar("C")
"""The sender's own note on a parcel."""
MIN_BYTES = 1 << 16
"""Of a buffer. Larger ones have a power of two, so that a buffer fits later parcels too."""


class Event(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Waits until the device has reached it."""
        ...


class Ready:
    """The event of a CPU, which has done everything by the time a call returns."""

    def synchronize(self) -> None:
        return None


READY = Ready()


class Lane:
    """The way to the host for tensors that are on the host already; base of other devices' lanes.

    `mark` runs on the thread that makes the tensors, the rest on the thread that takes them away.

    Attributes:
        overlaps: the device works while the host does something else.
    """

    overlaps = False

    def mark(self) -> Event:
        """A point behind all work that this thread has enqueued so far. Waits for nothing."""
        return READY

    @contextmanager
    def after(self, marks: Sequence[Event]) -> Iterator[None]:
        """Inside, work is enqueued beside the other thread's, behind these points of it.

        Tensors that it reads must neither be freed nor written until the event of its last `copy`.
        """
        del marks
        yield

    def host_bytes(self, size_bytes: int) -> Tensor:
        """Uninitialised uint8 memory that the device can copy to."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        """Copies to host memory, inside `after`; the event says when it is there."""
        target.copy_(source)
        return READY


class CudaLane(Lane):
    """A side stream of one CUDA device, and pinned host memory.

    The stream of a `mark` is the marking thread's current one.
    """

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)
        self._is_pageable = False

    def mark(self) -> Event:
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event

    @contextmanager
    def after(self, marks: Sequence[Event]) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            for mark in marks:
                self._side.wait_event(cast(torch.cuda.Event, mark))  # of this lane, so CUDA's
            yield

    def host_bytes(self, size_bytes: int) -> Tensor:
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # of CUDA: no more memory may be pinned
            if not self._is_pageable:
                reason = str(error).partition("\n")[0]
                log.warning(
                    "no pinned host memory (%s): traces leave through pageable memory", reason
                )
            self._is_pageable = True
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        target.copy_(source, non_blocking=True)
        # A blocking event lets the waiting thread sleep; others spin on a core.
        event = torch.cuda.Event(blocking=True)
        event.record(self._side)
        return event


def lane_for(device: torch.device) -> Lane:
    """The lane of a device."""
    return CudaLane(device) if device.type == "cuda" else Lane()


@dataclass
class BufferPool:
    """Host buffers up to a bound, each with one user at a time; pinning takes longer than a round.

    Not thread-safe.

    Attributes:
        allocate: uint8 memory of a size.
        max_bytes: of all buffers together; a buffer above it exists only alone.
        size_bytes: of the buffers that exist, free or taken. num_taken: of them.
    """

    allocate: Callable[[int], Tensor]
    max_bytes: int
    size_bytes: int = 0
    num_taken: int = 0
    _free: list[Tensor] = field(default_factory=list)

    def take(self, size_bytes: int) -> Tensor | None:
        """A buffer of at least this size; None until one is given back."""
        fitting = [buffer for buffer in self._free if buffer.nbytes >= size_bytes]
        buffer = min(fitting, key=lambda b: b.nbytes) if fitting else self._grown(size_bytes)
        if buffer is not None:
            self._free = [free for free in self._free if free is not buffer]
            self.num_taken += 1
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back that nobody reads or writes any more."""
        self._free.append(buffer)
        self.num_taken -= 1

    def _grown(self, size_bytes: int) -> Tensor | None:
        """A new buffer, in the place of free ones if there is no other; all are too small."""
        wanted = max(MIN_BYTES, 1 << (size_bytes - 1).bit_length())
        if wanted > self.max_bytes >= size_bytes:
            wanted = self.max_bytes
        while self._free and self.size_bytes + wanted > self.max_bytes:
            self.size_bytes -= self._free.pop().nbytes
        if self.num_taken and self.size_bytes + wanted > self.max_bytes:
            return None
        self.size_bytes += wanted
        return self.allocate(wanted)


class Field(NamedTuple):
    """One tensor of a parcel."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Parcel(Generic[C]):
    """Tensors on their way.

    Attributes:
        sources: tensors that the device still reads; kept until `event`.
    """

    context: C
    fields: list[Field]
    buffer: Tensor
    event: Event
    sources: tuple[Tensor, ...]


class Shipping(Generic[C]):
    """Sends named tensors over a lane, in order, through a bounded pool of buffers. For one thread.

    Args:
        max_bytes: of the pool.
    """

    def __init__(self, lane: Lane, max_bytes: int) -> None:
        self.lane, self.pool = lane, BufferPool(lane.host_bytes, max_bytes)
        self._under_way: deque[Parcel[C]] = deque()

    def send(self, tensors: Mapping[str, Tensor], context: C) -> list[tuple[C, dict[str, Tensor]]]:
        """Starts one parcel, inside the lane's `after`.

        Args:
            tensors: neither freed nor written until they landed; this object keeps them.

        Returns:
            earlier parcels that had to land because the pool had no room.
        """
        packed, fields = pack(tensors)
        landed = []
        while (buffer := self.pool.take(packed.nbytes)) is None:
            landed.append(self._land())
        event = self.lane.copy(buffer[: packed.nbytes], packed)
        sources = (packed, *tensors.values())
        self._under_way.append(Parcel(context, fields, buffer, event, sources))
        return landed

    def land(self, num_left: int = 0) -> list[tuple[C, dict[str, Tensor]]]:
        """Waits until at most `num_left` parcels are under way.

        Returns:
            contexts and tensors in plain memory, in the order in which they were sent.
        """
        return [self._land() for _ in range(len(self._under_way) - num_left)]

    def _land(self) -> tuple[C, dict[str, Tensor]]:
        parcel = self._under_way[0]
        parcel.event.synchronize()
        size_bytes = sum(field.size_bytes for field in parcel.fields)
        tensors = unpack(parcel.buffer[:size_bytes].clone(), parcel.fields)
        self._under_way.popleft()
        self.pool.give(parcel.buffer)
        return parcel.context, tensors


def pack(tensors: Mapping[str, Tensor]) -> tuple[Tensor, list[Field]]:
    """All tensors as bytes behind one another, the widest types first, so that all are aligned.

    Returns:
        `[bytes]` uint8 on their device, and the fields in the order of the bytes.
    """
    named = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in named]
    return torch.cat(parts), [Field(name, t.dtype, t.shape) for name, t in named]


def unpack(data: Tensor, fields: Sequence[Field]) -> dict[str, Tensor]:
    """Views of packed bytes."""
    parts = data.split([field.size_bytes for field in fields])
    return {
        field.name: part.view(field.dtype).view(field.shape)
        for field, part in zip(fields, parts, strict=True)
    }
