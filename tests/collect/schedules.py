"""Every order in which some actors' steps can happen, one run for each.

An actor is a function that is given a `step` to call before everything that others could notice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

Step = Callable[[], None]
Actor = Callable[[Step], None]


def all_runs(make: Callable[[], Sequence[Actor]]) -> Iterator[list[int]]:
    """Runs fresh actors under every schedule; yields each schedule after its run.

    Args:
        make: the actors of one run, over state of its own.
    """
    prefix: list[int] = []
    while True:
        taken, choices = _run(make(), prefix)
        yield taken
        while taken and taken[-1] == choices[-1][-1]:
            taken.pop()
            choices.pop()
        if not taken:
            return
        later = [actor for actor in choices[-1] if actor > taken[-1]]
        prefix = [*taken[:-1], later[0]]


def _run(actors: Sequence[Actor], prefix: list[int]) -> tuple[list[int], list[list[int]]]:
    """One run: the given choices first, then always the first actor that can go on."""
    turns = [_Turn(actor) for actor in actors]
    taken, choices = [], []
    while able := [number for number, turn in enumerate(turns) if not turn.is_done]:
        chosen = prefix[len(taken)] if len(taken) < len(prefix) else able[0]
        choices.append(able)
        taken.append(chosen)
        turns[chosen].go()
    for turn in turns:
        turn.finish()
    return taken, choices


class _Turn:
    """A thread that runs from one step to the next, when it is told to."""

    def __init__(self, actor: Actor) -> None:
        self._mine, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.is_done, self._failure = False, None
        self._thread = threading.Thread(target=self._work, args=(actor,))
        self._thread.start()
        self._back.acquire()  # it stands before its first step

    _failure: BaseException | None

    def go(self) -> None:
        self._mine.release()
        self._back.acquire()

    def finish(self) -> None:
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self, actor: Actor) -> None:
        try:
            actor(self._wait)
        except BaseException as failure:  # told to the test by `finish`
            self._failure = failure
        self.is_done = True
        self._back.release()

    def _wait(self) -> None:
        self._back.release()
        self._mine.acquire()
