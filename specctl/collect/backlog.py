"""A bounded queue from the decoding thread to the recording one; a full queue blocks.

Rounds hold whole logits while they wait, so the bound counts bytes as well as rounds. Blocking is
the policy on purpose: dropping rounds would bias the traces towards easy text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from specctl.errors import OutputError


@dataclass
class Backlog:
    """First in, first out; any number of items is taken at once.

    Attributes:
        max_items, max_bytes: bounds; a single item above `max_bytes` passes alone.
        wake_items: the consumer is woken at this many, or when its own time is up: a thread woken
            for each item would contend with decoding for the interpreter lock.
    """

    max_items: int
    max_bytes: int
    wake_items: int
    _items: list[Any] = field(default_factory=list)
    _bytes: int = 0
    _closed: bool = False
    _failure: BaseException | None = None
    _changed: Condition = field(default_factory=Condition)

    def put(self, item: Any, size_bytes: int = 0) -> None:
        """Appends an item, waiting for room.

        Raises:
            BaseException: what the consumer failed with.
            OutputError: the queue was closed.
        """
        with self._changed:
            while not self._has_room(size_bytes):
                self._changed.notify_all()
                self._changed.wait()
            self._check_open()
            self._items.append(item)
            self._bytes += size_bytes
            if len(self._items) >= self.wake_items or 2 * self._bytes >= self.max_bytes:
                self._changed.notify_all()

    def take(self, timeout_s: float) -> tuple[list[Any], bool]:
        """Everything that waits, after at most `timeout_s`, and whether more may come."""
        with self._changed:
            if not self._closed and len(self._items) < self.wake_items:
                self._changed.wait(timeout_s)
            items, self._items, self._bytes = self._items, [], 0
            self._changed.notify_all()
            return items, not self._closed

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

    def _has_room(self, size_bytes: int) -> bool:
        fits = len(self._items) < self.max_items and self._bytes + size_bytes <= self.max_bytes
        return fits or not self._items or self._closed or self._failure is not None

    def _check_open(self) -> None:
        self.raise_failure()
        if self._closed:
            raise OutputError(
                "trace recorder",
                expected="an open recorder",
                found="one that was closed",
                fix="record rounds inside its `with` block",
            )
