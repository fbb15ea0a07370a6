"""Between a writer and the operating system: counts every operation that changes a disk, and dies
or fails at the n-th."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

Mode = Literal["die", "die in write", "simulated death", "EIO", "ENOSPC", "EINTR"]
CALLS = ("open", "fsync", "link", "unlink", "mkdir", "close", "replace")
"""Functions of `os`; writes and closes of files opened for writing are counted besides."""
DIED = 77


class Death(BaseException):
    """The end of a process, without one: from here on no operation has an effect."""


class Shim:
    """Counts operations, and makes one of them go wrong.

    Args:
        at: number of the operation, from 0; it does not happen, or a write happens by half.

    Attributes:
        count: operations so far. hit: name of the one that went wrong.
    """

    def __init__(self, mode: Mode = "die", at: int = -1) -> None:
        self.mode, self.at, self.count = mode, at, 0
        self.hit: str | None = None
        self._opened: set[int] = set()

    def before(self, name: str, half: Callable[[], object] | None = None) -> None:
        """To be called ahead of each operation."""
        if self.hit is not None and self.mode == "simulated death":
            raise Death
        number, self.count = self.count, self.count + 1
        if number != self.at:
            return
        self.hit = name
        if self.mode == "simulated death":
            raise Death
        if half is not None and self.mode in ("die in write", "ENOSPC"):
            half()
        if self.mode.startswith("die"):
            os._exit(DIED)
        raise OSError(getattr(errno, self.mode), os.strerror(getattr(errno, self.mode)))

    @contextmanager
    def installed(self) -> Iterator[Shim]:
        try:
            with ExitStack() as patches:
                for name in CALLS:
                    patches.enter_context(patch.object(os, name, self._wrapped(name)))
                patches.enter_context(patch.object(io, "open", self._open))
                yield self
        finally:
            for descriptor in self._opened:  # what the system does for the dead, locks included
                os.close(descriptor)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.before(name)
            result = real(*args, **kwargs)
            if name == "open" and args[1] & os.O_DIRECTORY:  # others belong to file objects
                self._opened.add(result)
            elif name == "close":
                self._opened.discard(args[0])
            return result

        return call

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "x" not in mode and "w" not in mode:
            return REAL_OPEN(file, mode, *args, **kwargs)
        self.before("create")
        # As `open` does it: what is counted are the writes that reach the system.
        return io.BufferedWriter(Stream(REAL_OPEN(file, mode, 0, *args[1:], **kwargs), self))


REAL_OPEN = io.open


class Stream(io.RawIOBase):
    """A file whose writes are counted."""

    def __init__(self, inner: Any, shim: Shim) -> None:
        self._inner, self._shim = inner, shim

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._shim.before("write", lambda: self._inner.write(data[: len(data) // 2]))
        return int(self._inner.write(data))

    def tell(self) -> int:
        return int(self._inner.tell())

    def fileno(self) -> int:
        return int(self._inner.fileno())

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()
