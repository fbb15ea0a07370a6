"""Progress of long work, and the threads that work on chunks, by context instead of parameters.

Work says what it counts: `with progress("positions", 5000): ...`, and `advance("positions", 64)`
wherever some of it is done. The command line decides how it is shown; without it, nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Tick = Callable[[int], object]
ShowBar = Callable[[str, int | None], AbstractContextManager[Tick]]
"""Opens a bar for what is counted and how many there are; None: unknown."""

_show_bar: ShowBar = lambda label, total: nullcontext(lambda count: None)  # noqa: E731
_open: list[tuple[str, Tick]] = []
_num_threads = 1


def show_progress(show_bar: ShowBar) -> None:
    """Sets how this process shows progress."""
    global _show_bar
    _show_bar = show_bar


@contextmanager
def progress(counted: str, total: int | None) -> Iterator[None]:
    """Shows a bar while the block runs; `advance` moves it.

    Args:
        counted: what is counted, e.g. `positions`.
        total: how many there are; None if that is unknown.
    """
    with _show_bar(counted, total) as tick:
        _open.append((counted, tick))
        try:
            yield
        finally:
            _open.pop()


def advance(counted: str, count: int = 1) -> None:
    """Moves the innermost bar, if it counts these; safe to call where no bar is open."""
    if _open and _open[-1][0] == counted:
        _open[-1][1](count)


def set_chunk_threads(number: int) -> None:
    """Sets how many chunks of a log this process works on at a time; results do not change."""
    global _num_threads
    _num_threads = number


def chunk_threads() -> int:
    """How many chunks of a log this process works on at a time; 1 unless it was set."""
    return _num_threads
