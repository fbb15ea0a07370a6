"""A decode loop held at full batch and stepped round by round, on a clock.

On CUDA all times are between events on the stream, so that nothing waits which would not wait in
use; a round's time is from its predecessor's end to its own, host gaps included.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from specctl.policy import Policy
from specctl.replay.cost.probe import random_tokens
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair
from specctl.runtime.requests import Metrics, Request, Stopwatch, pooled

MOST_TRIES = 2
"""Rounds for each that is timed."""
MOST_EMITTED = 2
"""Tokens a round that requests have room for; a random target accepts next to nothing."""


@dataclass(frozen=True)
class Cell:
    """What is decoded: `batch_size` requests behind prompts of `context_tokens`."""

    batch_size: int
    context_tokens: int


class RoundClock(Stopwatch):
    """Keeps the order of a round's laps too."""

    def until(self, phase: str) -> float:
        """Time of the laps before the first one of a phase, us."""
        by_phase = {name: iter(times) for name, times in self.laps().items()}
        return sum(next(by_phase[name]) for name in takewhile(lambda p: p != phase, self._phases))


class Running:
    """A loop with every request admitted, until as many rounds as it was made for are over.

    Args:
        graphs: `GraphSettings`, or None for the ordinary loop.
    """

    def __init__(
        self, pair: Pair, policy: Policy, cell: Cell, *, num_rounds: int, graphs: Any = None
    ) -> None:
        self.device, room = pair.target.model.device, MOST_EMITTED * num_rounds + 64
        self.loop = DecodeLoop(
            pair.target.model,
            pair.drafter,
            policy,
            batch_size=cell.batch_size,
            max_text_tokens=cell.context_tokens + room,
            eos_ids=(),
            graphs=graphs,
        )
        for row in range(cell.batch_size):
            prompt = tuple(random_tokens(pair, cell.context_tokens, seed=row))
            self.loop.submit(Request(str(row), prompt, room))

    def step(self) -> None:
        """One round; the first reads the prompts too."""
        if self.loop.step():
            raise RuntimeError("a request ended inside the measurement: raise MOST_EMITTED")

    def steps(self, count: int) -> None:
        """Rounds that nobody looks at, done when this returns."""
        for _ in range(count):
            self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def round_us(self, count: int) -> list[float]:
        """Wall time of each of `count` rounds, us, those left out in which a graph was captured.

        A capture takes 50 to 200 ms, once a graph. After twice as many rounds there may be fewer.
        """
        clock, is_warm = Stopwatch(self.device), list[bool]()
        while sum(is_warm) < count and len(is_warm) < MOST_TRIES * count:
            before = self._work_not_replayed()
            self.step()
            clock.lap("round")
            is_warm.append(self._work_not_replayed() == before)
        return [us for us, warm in zip(clock.laps()["round"], is_warm, strict=True) if warm]

    def _work_not_replayed(self) -> tuple[int, int]:
        counters = self.loop.graph_counters
        return counters.captures, counters.eager_parts

    def drafting_us(self, count: int) -> float:
        """Wall time until verification begins, us, median over `count` rounds; 0 for none.

        Growing the tree and deciding on it; reading what was committed is not part of it.
        """
        clocks: list[RoundClock] = []
        with clocked(lambda: RoundClock(self.device), clocks):
            self.steps(count)
        return statistics.median(clock.until("verify") for clock in clocks)

    def booked(self) -> Metrics:
        """What all requests have been booked with so far."""
        return pooled(active.metrics for active in self.loop._active)


@contextmanager
def clocked(make: Callable[[], Stopwatch], made: list[Any]) -> Iterator[None]:
    """Has the runtime's rounds split by clocks of ours, which are kept in `made`."""
    modules = [m for name, m in sys.modules.items() if name.startswith("specctl.runtime")]
    users = [m for m in modules if getattr(m, "Stopwatch", None) is Stopwatch]

    def new(*_: Any) -> Stopwatch:
        made.append(make())
        return made[-1]

    for module in users:
        module.Stopwatch = new  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.Stopwatch = Stopwatch  # type: ignore[attr-defined]
