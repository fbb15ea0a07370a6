"""`DecodeLoop` without models: requests join free slots, the log decides their rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specctl.logs.positions import Floats, Longs, Positions
from specctl.replay.batch.rounds import BatchRounds, Verify, emitted_tokens, join_rounds
from specctl.replay.batch.slots import Slots

ONE_STEP = np.zeros(1, np.int64)
"""Where the rounds of a single step begin."""


class Loop:
    """Serves a queue, first come first served.

    Args:
        logged: `[M]` int64, the queue: requests of the log.

    Attributes:
        num_joined: requests that left the queue; the number of the next one.
    """

    def __init__(
        self, positions: Positions, logged: Longs, verify: Verify, batch_size: int
    ) -> None:
        self.positions, self.verify = positions, verify
        self._first_row = positions.start[logged]
        self._slots = Slots(batch_size)
        self._rounds: list[BatchRounds] = []
        self.num_joined = 0

    @property
    def is_empty(self) -> bool:
        """Whether no request is being decoded."""
        return self._slots.num_active == 0

    @property
    def busy(self) -> bool:
        """Whether a request waits or is being decoded."""
        return not self.is_empty or self.num_joined < len(self._first_row)

    @property
    def can_join(self) -> bool:
        """Whether there is a request to come and a free slot."""
        return self._slots.num_free > 0 and self.num_joined < len(self._first_row)

    def join(self) -> None:
        """Puts the next request into a slot."""
        self._slots.join(self.num_joined, int(self._first_row[self.num_joined]))
        self.num_joined += 1

    def step(self) -> BatchRounds:
        """One round of all active requests; the finished ones leave."""
        row, serial = self._slots.row.copy(), self._slots.serial.copy()
        verified, accepted = self.verify(row)
        emitted = emitted_tokens(self.positions, row, accepted)
        self._slots.row[:] += emitted
        self._slots.release(emitted == self.positions.remaining[row])
        rounds = BatchRounds(serial, row, verified, accepted, ONE_STEP)
        self._rounds.append(rounds)
        return rounds

    def rounds(self) -> BatchRounds:
        """All rounds so far."""
        return join_rounds(self._rounds)


def run_closed(loop: Loop) -> None:
    """Serves the whole queue; every free slot is filled before each round."""
    while loop.busy:
        while loop.can_join:
            loop.join()
        loop.step()


def run_open(
    loop: Loop,
    arrival_us: Floats,
    prompt_us: Floats,
    round_us: Callable[[BatchRounds], float],
) -> tuple[Floats, Floats]:
    """Serves requests as they arrive; those that arrive while prompts are read join at once.

    Args:
        arrival_us, prompt_us: `[M]` of the queue. round_us: time of a step's rounds.

    Returns:
        `[S]` start of each step and time of its rounds.
    """
    now, starts, times = 0.0, [], []
    while loop.busy:
        if loop.is_empty:
            now = max(now, float(arrival_us[loop.num_joined]))
        starts.append(now)
        while loop.can_join and arrival_us[loop.num_joined] <= now:
            now += float(prompt_us[loop.num_joined])
            loop.join()
        times.append(round_us(loop.step()))
        now += times[-1]
    return np.array(starts), np.array(times)
