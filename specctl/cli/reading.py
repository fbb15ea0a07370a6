"""Verbs that only read: interrupted, they have nothing to keep, and say so."""

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


def reads_only(verb: Callable[P, R]) -> Callable[P, R]:
    """Ends a verb at Ctrl-C or SIGTERM with the code of that, and promises nothing."""
    return _ending(verb, lambda _: True)


def reads_only_without(option: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same for a verb that writes only where an option says where to, or that it should."""
    return lambda verb: _ending(verb, lambda given: given.get(option) in (None, False))


def _ending(
    verb: Callable[P, R], is_reading: Callable[[Mapping[str, object]], bool]
) -> Callable[P, R]:
    @functools.wraps(verb)
    def ended(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_reading(kwargs):
            return verb(*args, **kwargs)
        with _noting_termination() as noted:
            try:
                return verb(*args, **kwargs)
            except KeyboardInterrupt:
                word, code = ("terminated", TERMINATED) if noted else ("interrupted", INTERRUPTED)
                typer.echo(f"{word}: nothing was written", err=True)
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
