"""What differs between devices: streams, events and the host memory that copies go to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor

log = logging.getLogger("specctl.collect")


class Event(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Waits until it has."""
        ...


class Lane(Protocol):
    """The way from one device to the host. `mark` runs on the thread that makes the tensors, the
    rest on the thread that takes them away.

    Attributes:
        overlaps: the device works while the host does something else.
    """

    overlaps: bool

    def mark(self) -> Event:
        """A point behind all that this thread has enqueued so far. Waits for nothing."""
        ...

    def after(self, marks: Sequence[Event]) -> AbstractContextManager[None]:
        """Inside, work is enqueued beside the other thread's, behind these points of it.

        What it reads must neither be freed nor written until the event of its last `copy`.
        """
        ...

    def host_bytes(self, size_bytes: int) -> Tensor:
        """Uninitialised uint8 memory that the device can copy to."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> Event:
        """Copies to host memory, inside `after`; the event says when it is there."""
        ...


class _Ready:
    """A CPU has done everything by the time a call returns."""

    def synchronize(self) -> None:
        return None


READY = _Ready()


class HostLane:
    """Tensors that are on the host already."""

    overlaps = False

    def mark(self) -> Event:
        return READY

    @contextmanager
    def after(self, marks: Sequence[Event]) -> Iterator[None]:
        del marks
        yield

    def host_bytes(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        target.copy_(source)
        return READY


class CudaLane:
    """A side stream of one CUDA device, and pinned host memory.

    The stream that a `mark` stands on is the marking thread's current one.
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
            self._fall_back(error)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        target.copy_(source, non_blocking=True)
        # A blocking event lets the waiting thread sleep; others spin on a core.
        event = torch.cuda.Event(blocking=True)
        event.record(self._side)
        return event

    def _fall_back(self, error: RuntimeError) -> None:
        """Says once that copies will wait for the device, in the thread that makes them."""
        if not self._is_pageable:
            reason = str(error).partition("\n")[0]
            log.warning("no pinned host memory (%s): traces leave through pageable memory", reason)
        self._is_pageable = True


def lane_for(device: torch.device) -> Lane:
    """The lane of a device."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
