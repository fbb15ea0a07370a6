"""Devices that are not there: lanes that copy at the worst moment, or when a gate opens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event as Flag

import torch
from torch import Tensor

from specctl.collect.transfer import Event, Lane

POISON = 0xAB


class Copy:
    """One copy under way; the device reads its source whenever it pleases before `synchronize`
    returns, and has no claim on it: a source that is freed too early is caught."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self._source = target, weakref.ref(source)
        self._done = self.is_read = False

    def happen(self) -> None:
        if not self._done:
            source = self._source()
            assert source is not None, "a source was freed before the device had read it"
            self.target.copy_(source)
        self._done = True

    def synchronize(self) -> None:
        self.happen()
        self.is_read = True


@dataclass
class FakeLane(Lane):
    """Copies at once (`early`) or when somebody waits (`late`): both are what a device may do.

    Host memory is written anew once it was read, as pinned memory is.

    Attributes:
        on_copy: called before each copy.
        handed, behind: marks that were given out, and those that work was enqueued behind.
    """

    early: bool = False
    on_copy: Callable[[], None] = lambda: None
    handed: list[Event] = field(default_factory=list)
    behind: list[Event] = field(default_factory=list)
    overlaps: bool = True
    _copies: list[Copy] = field(default_factory=list)

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
        for copy in self._copies:
            if copy.is_read:
                copy.target.fill_(POISON)
        self._copies = [copy for copy in self._copies if not copy.is_read]
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Event:
        self.on_copy()
        copy = Copy(target, source)
        self._copies.append(copy)
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
        assert self.open.wait(30)
