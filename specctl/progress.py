"""Progress of long work, and the number of threads, kept per process.

Work opens a bar with `with progress("positions", 5000): ...` and moves it with
`advance("positions", 64)`. The command line sets how bars are shown; by default they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Tick = Callable[[int], object]
ShowBar = Callable[[str, int | None], AbstractContextManager[Tick]]
"""Opens a bar with a label and a total, None if unknown."""

_show_bar: ShowBar = lambda label, total: nullcontext(lambda count: None)  # noqa: E731
_open: list[tuple[str, Tick]] = []
_num_threads = 1


def show_progress(show_bar: ShowBar) -> None:
    """Sets how this process shows progress."""
    global _show_bar
    _show_bar = show_bar


@contextmanager
def progress(counted: str, total: int | None, label: str = "") -> Iterator[None]:
    """Shows a bar while the block runs; `advance` moves it.

    Args:
        counted: the unit, e.g. `positions`.
        total: None if it is unknown. Work that goes on behind a full bar opens one of its own.
        label: shown in place of the unit.
    """
    with _show_bar(label or counted, total) as tick:
        _open.append((counted, tick))
        try:
            yield
        finally:
            _open.pop()


def advance(counted: str, count: int = 1) -> None:
    """Moves the innermost bar if it has this unit; does nothing without one."""
    if _open and _open[-1][0] == counted:
        _open[-1][1](count)


def set_chunk_threads(number: int) -> None:
    """Sets the number of threads for chunks of a log; results do not depend on it."""
    global _num_threads
    _num_threads = number


def chunk_threads() -> int:
    """The number of threads for chunks of a log; 1 by default."""
    return _num_threads
