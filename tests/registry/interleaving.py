"""Two actors on one store, their calls interleaved as told: every schedule, not a lucky few.

An actor runs in a thread of its own, but only when it has the turn; the turn may pass before any
call that could concern the other one. A schedule is the first actor and the number of such calls
before each pass; when it is used up, the one who has the turn goes on to its end, then the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

from tests.registry.worlds import HandClock, Wrapped

USER, COLLECTOR = 0, 1


@dataclass
class Turns:
    """Who may go on, and for how many calls."""

    first: int
    lengths: list[int]
    alive: list[bool] = field(default_factory=lambda: [True, True])
    pending: list[str] = field(default_factory=lambda: ["", ""])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.current = self.first
        self.left = self._next_length()

    def _next_length(self) -> int:
        return self.lengths.pop(0) if self.lengths else 10**9

    def take(self, actor: int, call: str) -> None:
        """Waits for the turn to make a call, passing it on first where the schedule says so."""
        with self.changed:
            self.pending[actor] = call
            if self.current == actor and self.left == 0:
                self._pass()
            self.changed.wait_for(lambda: self.current == actor)
            self.left -= 1
            self.pending[actor] = ""

    def _pass(self) -> None:
        if self.alive[1 - self.current]:
            self.current = 1 - self.current
        self.left = self._next_length()
        self.changed.notify_all()

    def end(self, actor: int) -> None:
        with self.changed:
            self.alive[actor] = False
            if self.current == actor:
                self._pass()

    def wait_at_start(self, actor: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.current == actor)

    def jump(self, clock: HandClock, seconds: float) -> None:
        """Time passes, but not within the one request between `Hold.check` and its answer."""
        with self.changed:
            while self.alive[USER] and self.pending[USER].startswith("commit"):
                self.current, self.left = USER, 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.current == COLLECTOR)
            clock.now_s += seconds


@dataclass
class Turned(Wrapped):
    """The store as one actor has it.

    Attributes:
        concerns: whether the other actor could notice a call, or be noticed by it.
    """

    turns: Turns | None = None
    actor: int = USER
    concerns: Callable[[str, str], bool] = lambda word, key: True
    num_calls: int = 0

    def step(self, word: str, key: str, act: Callable[[], object]) -> object:
        if self.concerns(word, key):
            self.num_calls += 1
            is_commit = word == "put" and key.startswith(("log/q", "pins/"))
            if self.turns is not None:
                self.turns.take(self.actor, "commit" if is_commit else word)
        return act()


def run(turns: Turns, actors: tuple[Callable[[], None], Callable[[], None]]) -> None:
    """Runs both to their ends; what they raise is theirs to catch."""

    def work(actor: int) -> None:
        turns.wait_at_start(actor)
        try:
            actors[actor]()
        finally:
            turns.end(actor)

    threads = [threading.Thread(target=work, args=(actor,)) for actor in (USER, COLLECTOR)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "the schedule hangs"


def schedules(num_calls: tuple[int, int], num_passes: int) -> Iterator[Turns]:
    """Every schedule with up to this many passes of the turn, for actors of so many calls."""
    for first in (USER, COLLECTOR):
        bounds = [num_calls[(first + turn) % 2] for turn in range(num_passes)]
        for lengths in product(*(range(bound + 1) for bound in bounds)):
            mine, theirs = sum(lengths[::2]), sum(lengths[1::2])
            if mine <= num_calls[first] and theirs <= num_calls[1 - first]:
                yield Turns(first, list(lengths))
