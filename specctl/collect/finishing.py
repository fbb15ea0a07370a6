"""The last commit of a collection, which no impatient Ctrl-C may cost what was finished."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from specctl.errors import OutputError

Handler = Callable[[int, FrameType | None], object]
PATIENCE_S = 30.0
"""A commit takes a fraction of a second, to a slow bucket some seconds; what is stuck may end."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def finishing() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is through, for `PATIENCE_S` at most.

    Raises:
        KeyboardInterrupt: behind the block, where one came meanwhile.
        OutputError: the block took longer, and was then ended by one.
    """
    if threading.current_thread() is not threading.main_thread():  # where no signal is handled
        yield
        return
    found = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: one for number, one in found.items() if callable(one)}  # none that ignores
    waiting: list[int] = []
    for number, handler in handlers.items():
        signal.signal(number, _patient(handler, waiting))
    try:
        yield
    except KeyboardInterrupt:
        raise OutputError(
            "trace set",
            expected="the last commit before the end",
            found=f"an interrupt, {PATIENCE_S:g} s after it began",
            fix="decode again what it held, with --resume",
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for arrived in waiting[:1]:
        signal.raise_signal(arrived)


def _patient(handler: Handler, waiting: list[int]) -> Handler:
    """A handler that keeps signals in a list, and after a while passes them on."""
    begun = time.monotonic()

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - begun < PATIENCE_S:
            waiting.append(number)
        else:
            handler(number, frame)

    return handle
