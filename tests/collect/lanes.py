"""Devices that are not there: lanes that copy at the worst moment, or when they are told."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event as Flag

import torch
from torch import Tensor

from specctl.collect.shipping import Event, Lane

POISON = 0xAB


class Copy:
    """One copy under way; the device reads its source whenever it pleases before `synchronize`
    returns, and has no claim on it: who lets go of the source too early is caught."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source, self._done = target, weakref.ref(source), False

    def happen(self) -> None:
        if not self._done:
            source = self._source()
            assert source is not None, "a source was freed before the device had read it"
            self._target.copy_(source)
        self._done = True

    def synchronize(self) -> None:
        self.happen()


@dataclass
class FakeLane(Lane):
    """Copies at once (`early`) or when somebody waits (`late`): both are what a device may do.

    Attributes:
        on_copy: called before each copy.
        handed, behind: marks that were given out, and those that work was enqueued behind.
    """

    early: bool = False
    on_copy: Callable[[], None] = lambda: None
    handed: list[Event] = field(default_factory=list)
    behind: list[Event] = field(default_factory=list)
    overlaps: bool = True

    def mark(self) -> Event:
        mark = Copy(torch.empty(0), torch.empty(0))
        self.handed.append(mark)
        return mark

    @contextmanager
    def after(self, marks: Sequence[Event]) -> Iterator[None]:
        assert marks, "work beside a stream must stand behind some point of it"
        self.behind += marks
        yield

    def host_bytes(self, size_bytes: int) -> Tensor:
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        self.on_copy()
        copy = Copy(target, source)
        if self.early:
            copy.happen()
        return copy


class Gate:
    """A device that gets no further until it is opened."""

    def __init__(self) -> None:
        self.open = Flag()

    def lane(self) -> FakeLane:
        return FakeLane(on_copy=self._wait)

    def _wait(self) -> None:
        assert self.open.wait(30), "the test never opened the gate"
