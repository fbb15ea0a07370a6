"""Device work recorded once and replayed: CUDA graphs by key, lazily, within a memory limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

Found = TypeVar("Found")
log = logging.getLogger("specctl.graphs")
BROKEN: list[str] = []
"""What ended all capturing in this process: torch's allocator is in doubt behind it."""


class Recording(NamedTuple):
    """What a capture made.

    Attributes:
        replay: does the recorded work again, at the same addresses.
        found: what the function returned: tensors that every replay fills anew.
        num_bytes: memory that it holds as long as it lives.
    """

    replay: Callable[[], None]
    found: Any
    num_bytes: int


class Capture(Protocol):
    """Records a function's device work without doing it."""

    def record(self, function: Callable[[], Any]) -> Recording:
        """The recording.

        Raises:
            RuntimeError: it cannot be captured; `torch.OutOfMemoryError` where there is no room.
        """
        ...

    def forget(self) -> None:
        """No recording is used any more: their memory may go."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool, since they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None  # the first graph's own
        # Streams come in turn from a few; those of this priority are nobody else's here.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def record(self, function: Callable[[], Any]) -> Recording:
        graph, before = torch.cuda.CUDAGraph(), self._reserved()
        with (
            # A capture that fails would leave its own stream behind as the current one.
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            # Other threads (a recorder's) may allocate meanwhile; that is none of its business.
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            found = function()
        self._pool = graph.pool()
        return Recording(graph.replay, found, max(0, self._reserved() - before))

    def forget(self) -> None:
        self._pool = None

    def _reserved(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what stays reserved then is in use, or a graph's
        return torch.cuda.memory_reserved(self.device)


@dataclass
class GraphCounters:
    """What became of the parts of rounds that may be graphs.

    Attributes:
        captures: graphs recorded. replays: parts that a graph did.
        eager_parts: parts done without one; the first of every key is, to warm up.
        eager_rounds: rounds in which some part was done without one, those of the ordinary
            loop among them where graphs were asked for.
        failed_captures: keys that stay eager: memory ran out, the limit was reached, or the work
            cannot be captured.
        planned_waits: times that the host waited for the device, all of them planned: once a
            round for what it emitted, and where drafting may stop.
        graph_bytes: memory that the graphs hold.
    """

    captures: int = 0
    replays: int = 0
    eager_parts: int = 0
    eager_rounds: int = 0
    failed_captures: int = 0
    planned_waits: int = 0
    graph_bytes: int = 0


@dataclass
class GraphCache:
    """Graphs by key.

    A key's first use runs as it is, which compiles kernels and fills the libraries' caches; its
    second is captured; all others are replayed. What cannot be captured runs as it is: a key that
    found no room alone, and every other key after work that asks the device while it is captured,
    in this process, since such a failure leaves torch's allocator in doubt.

    Attributes:
        capture: how; None for never.
        limit_bytes: of all graphs together; nothing is captured once it is reached.
        counters: shared with the round's other parts.
    """

    capture: Capture | None
    limit_bytes: int
    counters: GraphCounters = field(default_factory=GraphCounters)
    _graphs: dict[Hashable, Recording] = field(default_factory=dict)
    _seen: set[Hashable] = field(default_factory=set)
    _refused: set[Hashable] = field(default_factory=set)

    @property
    def keys(self) -> tuple[Any, ...]:
        """Of the graphs that there are."""
        return tuple(self._graphs)

    def run(self, key: Hashable, function: Callable[[], Found]) -> Found:
        """Does the work of a key; the function must be the same in all that it bakes in."""
        recording = self._graphs.get(key) or self._recorded(key, function)
        if recording is None:
            self.counters.eager_parts += 1
            found: Found = function()
            self._seen.add(key)  # who raised before is tried as it is again
            return found
        recording.replay()
        self.counters.replays += 1
        return cast(Found, recording.found)

    def _recorded(self, key: Hashable, function: Callable[[], Any]) -> Recording | None:
        if self.capture is None or key in self._refused or key not in self._seen:
            return None
        held = self.counters.graph_bytes
        if held >= self.limit_bytes:
            self._refuse(key, f"graphs hold {held:,} of {self.limit_bytes:,} bytes")
            return None
        try:
            recording = self.capture.record(function)
        except RuntimeError as error:
            self._note_failure(self.capture, key, error)
            return None
        self.counters.captures += 1
        self.counters.graph_bytes += recording.num_bytes
        self._graphs[key] = recording
        return recording

    def _note_failure(self, capture: Capture, key: Hashable, error: RuntimeError) -> None:
        """Memory ran out, which is one key's trouble, or the work cannot be captured at all.

        What a failed capture took stays in the pool that the graphs share as long as one of them
        lives, and running the work as it is needs that memory: so all go, and are made again.
        """
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            self._graphs.clear()
            self.counters.graph_bytes = 0
            capture.forget()
            self._refuse(key, f"out of memory: {first_line(error)}")
        else:  # e.g. experts that are counted on the host
            self.capture = None
            BROKEN.append(first_line(error))
            self._refuse(key, f"{first_line(error)}; nothing is captured from now on")

    def _refuse(self, key: Hashable, reason: str) -> None:
        self._refused.add(key)
        self.counters.failed_captures += 1
        log.warning("no graph for %s, which runs eagerly: %s", key, reason)


def first_line(error: Exception) -> str:
    """What an error says, without torch's long advice."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
