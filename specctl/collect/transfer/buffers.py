"""Host buffers that are used again, because pinning memory takes longer than a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

MIN_BYTES = 1 << 16
"""Of a buffer; larger ones have a power of two, so that those of one size fit the next too."""


@dataclass
class BufferPool:
    """Buffers up to a bound, each with one user at a time. Not thread-safe.

    Attributes:
        allocate: uint8 memory of a size.
        max_bytes: of all buffers together; one above it exists only alone.
        size_bytes: of the buffers that exist, free or taken.
        num_taken: of them.
    """

    allocate: Callable[[int], Tensor]
    max_bytes: int
    size_bytes: int = 0
    num_taken: int = 0
    _free: list[Tensor] = field(default_factory=list)

    def take(self, size_bytes: int) -> Tensor | None:
        """A buffer of at least this size; None until one is given back."""
        fitting = [buffer for buffer in self._free if buffer.nbytes >= size_bytes]
        buffer = min(fitting, key=lambda b: b.nbytes) if fitting else self._grown(size_bytes)
        if buffer is not None:
            self._free = [free for free in self._free if free is not buffer]
            self.num_taken += 1
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back that nobody reads or writes any more."""
        self._free.append(buffer)
        self.num_taken -= 1

    def _grown(self, size_bytes: int) -> Tensor | None:
        """A new buffer, in the place of free ones if there is no other; all are too small."""
        wanted = max(MIN_BYTES, 1 << (size_bytes - 1).bit_length())
        if wanted > self.max_bytes >= size_bytes:
            wanted = self.max_bytes
        while self._free and self.size_bytes + wanted > self.max_bytes:
            self.size_bytes -= self._free.pop().nbytes
        if self.num_taken and self.size_bytes + wanted > self.max_bytes:
            return None
        self.size_bytes += wanted
        return self.allocate(wanted)
