"""The slots of a served batch: who is in them, in the order in which the decode loop keeps them.

The order matters where a budget breaks ties by row, so it is that of `runtime/decode.py`: a request
joins behind the others, and the last one moves into the place of one that finished.
"""

from __future__ import annotations

import numpy as np

from specctl.logs.positions import Bools, Longs


class Slots:
    """At most `batch_size` requests.

    Attributes:
        num_active: A.
    """

    def __init__(self, batch_size: int) -> None:
        self._serial = np.zeros(batch_size, np.int64)
        self._row = np.zeros(batch_size, np.int64)
        self.num_active = 0

    @property
    def num_free(self) -> int:
        """Slots that hold no request."""
        return len(self._row) - self.num_active

    @property
    def serial(self) -> Longs:
        """`[A]` number of each request in the queue; a view."""
        return self._serial[: self.num_active]

    @property
    def row(self) -> Longs:
        """`[A]` position of the log where each request stands; a view."""
        return self._row[: self.num_active]

    def join(self, serial: int, row: int) -> None:
        """Puts a request into the next slot."""
        self._serial[self.num_active] = serial
        self._row[self.num_active] = row
        self.num_active += 1

    def release(self, is_done: Bools) -> None:
        """Frees the slots of the finished."""
        for slot in np.flatnonzero(is_done)[::-1]:
            self.num_active -= 1
            for column in (self._serial, self._row):
                column[slot] = column[self.num_active]
