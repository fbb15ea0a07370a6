"""A bounded queue from the decoding thread to the recording one.

Rounds hold whole logits until their statistics have left the device, so the bound counts bytes as
well as rounds, and a round counts until it is released, not until it is taken. What a full queue
means is the caller's choice: `put` waits for room, or tells that there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Condition
from typing import Generic, NamedTuple, TypeVar

from specctl.errors import OutputError


class Size(NamedTuple):
    """Of what waits."""

    items: int
    bytes: int


NOTHING = Size(0, 0)
T = TypeVar("T")


@dataclass
class Backlog(Generic[T]):
    """First in, first out; any number of items is taken at once.

    Attributes:
        max_items, max_bytes: bounds; a single item above `max_bytes` passes alone.
        wake_items: the consumer is woken at this many, or when its own time is up: a thread woken
            for each item would contend with decoding for the interpreter lock.
    """

    max_items: int
    max_bytes: int
    wake_items: int
    _items: list[T] = field(default_factory=list)
    _queued: Size = NOTHING
    _taken: Size = NOTHING
    _closed: bool = False
    _failure: BaseException | None = None
    _changed: Condition = field(default_factory=Condition)

    def put(self, item: T, size_bytes: int = 0, *, wait: bool = True) -> bool:
        """Appends an item if there is room.

        Args:
            wait: for room, as long as it takes.

        Returns:
            whether it was appended.

        Raises:
            BaseException: what the consumer failed with.
            OutputError: the queue was closed.
        """
        with self._changed:
            while wait and not self._has_room(size_bytes):
                self._changed.notify_all()
                self._changed.wait()
            self._check_open()
            if self._has_room(size_bytes):
                self._append(item, size_bytes)
                return True
            self._changed.notify_all()
            return False

    def tell(self, item: T) -> None:
        """Appends an item whatever the bounds say; see `put` for what it raises."""
        with self._changed:
            self._check_open()
            self._append(item, 0)

    def take(self, timeout_s: float) -> tuple[list[T], bool]:
        """Everything that waits, after at most `timeout_s`, and whether more may come."""
        with self._changed:
            if not self._closed and len(self._items) < self.wake_items:
                self._changed.wait(timeout_s)
            items, self._items = self._items, []
            self._taken = _sum(self._taken, self._queued)
            self._queued = NOTHING
            return items, not self._closed

    def release(self) -> None:
        """What was taken is gone: there is room for as much again."""
        with self._changed:
            self._taken = NOTHING
            self._changed.notify_all()

    def close(self) -> None:
        """No more items; the consumer sees what waits and then the end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Called by a consumer that cannot go on; its error surfaces at the next `put`."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raises what the consumer failed with, if it did."""
        if self._failure is not None:
            raise self._failure

    def _append(self, item: T, size_bytes: int) -> None:
        self._items.append(item)
        self._queued = _sum(self._queued, Size(1, size_bytes))
        if len(self._items) >= self.wake_items or 2 * self._queued.bytes >= self.max_bytes:
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        """An item above every bound has room where nothing else waits."""
        waits = _sum(self._queued, self._taken)
        fits = waits.items < self.max_items and waits.bytes + size_bytes <= self.max_bytes
        return fits or not waits.items or self._closed or self._failure is not None

    def _check_open(self) -> None:
        self.raise_failure()
        if self._closed:
            raise OutputError(
                "trace recorder",
                expected="an open recorder",
                found="one that was closed",
                fix="record rounds inside its `with` block",
            )


def _sum(a: Size, b: Size) -> Size:
    return Size(a.items + b.items, a.bytes + b.bytes)
