"""What a verb says that is interrupted, where that is not 'what was finished is kept'."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

import typer

from specctl.cli.app import INTERRUPTED, TERMINATED

P = ParamSpec("P")
R = TypeVar("R")


Words = Callable[[Mapping[str, object]], str | None]
"""What a verb says, by its arguments; None leaves it to `main`."""
NOTHING = "nothing was written"


def reads_only(verb: Callable[P, R]) -> Callable[P, R]:
    """Of a verb that only reads: it has nothing to keep, and promises nothing."""
    return _ending(verb, lambda _: NOTHING)


def reads_only_without(option: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same for a verb that writes only where an option says where to, or that it should."""
    return lambda verb: _ending(
        verb, lambda given: NOTHING if given.get(option) in (None, False) else None
    )


def commits(verb: Callable[P, R]) -> Callable[P, R]:
    """Of a verb that writes to the history of its `name`: whether it did is read there."""
    return _ending(verb, lambda given: in_history(given["name"]))


def commits_where(words: Words) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same for a verb that writes to another history, or only with some arguments."""
    return lambda verb: _ending(verb, words)


def in_history(name: object) -> str:
    return f"it may have been done: specctl registry log {name} tells"


def _ending(verb: Callable[P, R], words: Words) -> Callable[P, R]:
    """Ends a verb at Ctrl-C or SIGTERM with the code of that, and its own words."""

    @functools.wraps(verb)
    def ended(*args: P.args, **kwargs: P.kwargs) -> R:
        said = words(kwargs)
        if said is None:
            return verb(*args, **kwargs)
        with _noting_termination() as noted:
            try:
                return verb(*args, **kwargs)
            except KeyboardInterrupt:
                word, code = ("terminated", TERMINATED) if noted else ("interrupted", INTERRUPTED)
                typer.echo(f"{word}: {said}", err=True)
                raise SystemExit(code) from None

    return ended


@contextmanager
def _noting_termination() -> Iterator[list[int]]:
    """Notes a SIGTERM that somebody handles, and lets them: `main` raises KeyboardInterrupt."""
    noted: list[int] = []
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        handler(number, frame)

    signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, handler)
