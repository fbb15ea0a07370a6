"""Device work recorded once and replayed: CUDA graphs by key, lazily, in bounded memory."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from threading import get_ident
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import torch

from specctl.errors import UsageError
from specctl.kernels.dispatch import has_triton, wanted_backend
from specctl.runtime.identity import first_line

Found = TypeVar("Found")
log = logging.getLogger("specctl.graphs")
REMEMBERED = 4
"""Last rounds whose largest need a tier covers: cutting a tree costs more than some padding."""
WAITING_ROWS = 4
"""Requests up to which the host waits where drafting may stop. A wait costs about a twentieth of a
drafted level of an 8B pair's head, and pays only if all requests stop."""


class Recording(NamedTuple):
    """The result of a capture."""

    replay: Callable[[], None]  # repeats the recorded work at the same addresses
    found: Any  # the function's result: tensors that every replay overwrites
    num_bytes: int  # memory held as long as the recording lives


class Capture(Protocol):
    """Records a function's device work without executing it."""

    def record(self, function: Callable[[], Any]) -> Recording:
        """Records a function, or raises `RuntimeError`, as `torch.OutOfMemoryError` is."""
        ...

    def forget(self) -> None:
        """Frees the memory of all recordings, which are no longer used."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool, since they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None  # of the first graph
        self._stream = capture_stream(device)

    def record(self, function: Callable[[], Any]) -> Recording:
        load_libraries(self.device, self._stream, get_ident())
        pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            recording = self._record(function, pool)
        except BaseException:
            self._recover(pool)
            raise
        self._pool = pool
        return recording

    def forget(self) -> None:
        torch.cuda.synchronize(self.device)  # a dropped graph may still be running
        self._pool = None

    def _record(self, function: Callable[[], Any], pool: Any) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with (
            # A failed capture would leave its own stream as the current one.
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            # Other threads, such as a recorder's, may allocate meanwhile.
            torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            before = torch.cuda.memory_reserved(self.device)  # torch has emptied its cache
            found = function()
        held = torch.cuda.memory_reserved(self.device) - before
        return Recording(graph.replay, found, max(0, held))

    def _recover(self, pool: Any) -> None:
        """Restores the state of torch after a failed capture.

        torch before 2.12 leaves the allocator recording (its pull request 180395): memory is then
        never freed and no other graph can be captured. The random generator, which every replay
        reads, counts as captured until the next capture ends, so a tiny graph is captured. The
        pool is dropped, as torch may reject it.
        """
        self._pool = None
        self._end_allocation(pool)
        one = torch.zeros(1, device=self.device)
        self._record(lambda: one.add_(1), torch.cuda.graph_pool_handle())

    def _end_allocation(self, pool: Any) -> None:
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        try:
            torch._C._cuda_endAllocateToPool(index, pool)
        except RuntimeError:  # torch has ended it
            return
        torch._C._cuda_releasePool(index, pool)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all graphs of a device are captured."""
    # torch hands out 32 streams of a priority in turn; this priority is used only here.
    return torch.cuda.Stream(device, priority=-1)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@cache
def load_libraries(device: torch.device, stream: torch.cuda.Stream, thread: int) -> None:
    """Has cuBLAS and cuBLASLt allocate their workspaces, 32 to 64 MB, outside every graph's pool.

    They keep one for each thread and stream, allocated at first use, which would be a capture.
    """
    del thread
    with torch.cuda.stream(stream), torch.inference_mode():
        one = torch.ones(16, 16, device=device)
        torch.addmm(one[0], one, one @ one)
    torch.cuda.synchronize(device)


@dataclass(frozen=True)
class GraphSettings:
    """Settings of a loop's captures."""

    capture: Capture | Literal["auto", "none"] = "auto"
    """`auto` makes CUDA graphs on a CUDA device, `none` runs the same work eagerly; or another
    recorder."""
    limit_bytes: int = 4 << 30  # memory of all graphs together
    stop_waits: Literal["auto", "always", "never"] = "auto"
    """Whether the host waits, at levels where a policy may stop, to skip drafting if all requests
    stopped. `auto` waits in batches of up to 4; `never` drafts every level in one graph and drops
    surplus nodes on the device; `always` makes a graph of every level for all policies."""
    flat_tokens: int = 64
    """Smallest tier: verifying fewer tokens takes the same time, that of reading the weights."""

    def __post_init__(self) -> None:
        known = self.stop_waits in ("auto", "always", "never")
        if self.limit_bytes < 0 or self.flat_tokens < 1 or not known:
            raise UsageError(
                f"graph settings: limit_bytes {self.limit_bytes} must be at least 0, "
                f"flat_tokens {self.flat_tokens} at least 1, and stop_waits "
                f"{self.stop_waits!r} auto, always or never"
            )

    def capture_on(self, devices: tuple[torch.device, ...]) -> Capture | None:
        """The recorder, or None: reference kernels synchronise with the host, which a capture
        forbids, and a graph covers one device."""
        if not isinstance(self.capture, str):
            return self.capture
        fused = has_triton() and wanted_backend() != "reference"
        is_possible = self.capture == "auto" and devices[0].type == "cuda" and fused
        return CudaCapture(devices[0]) if is_possible and len(devices) == 1 else None

    def waits(self, num_rows: int) -> bool:
        """Whether the host waits for batches of this size."""
        return self.stop_waits == "always" or (
            self.stop_waits == "auto" and num_rows <= WAITING_ROWS
        )


@dataclass
class GraphCounters:
    """Counts of the parts of rounds that may be graphs."""

    captures: int = 0  # graphs recorded
    replays: int = 0  # parts replayed
    eager_parts: int = 0  # parts run eagerly; the first of every key is, to warm up
    eager_rounds: int = 0  # rounds with an eager part, though graphs are on
    failed_captures: int = 0
    """Keys that stay eager: memory ran out, the limit was reached, or capture is impossible."""
    planned_waits: int = 0
    """Waits of the host for the device: once a round for the emitted tokens, and where drafting
    may stop."""
    graph_bytes: int = 0  # memory that the graphs hold


@dataclass
class GraphCache:
    """Graphs by key.

    A key's first use runs eagerly, which compiles kernels and fills the libraries' caches; its
    second use is captured; later ones are replayed. Work that synchronises with the host during a
    capture ends all captures of this cache and drops its graphs.

    A key stays eager if its graph runs out of memory or exceeds the limit. A graph's size is known
    only after its capture, and a shared pool is freed only with all of its graphs, so all graphs
    are dropped, and captured again at their next use. That happens at most once a key.
    """

    capture: Capture | None  # None for never
    limit_bytes: int  # of all graphs; halved from what they held when memory ran out
    counters: GraphCounters = field(default_factory=GraphCounters)
    _graphs: dict[Hashable, Recording] = field(default_factory=dict)
    _warm: set[Hashable] = field(default_factory=set)
    _refused: set[Hashable] = field(default_factory=set)
    _is_over: bool = False

    @property
    def keys(self) -> tuple[Any, ...]:
        return tuple(self._graphs)

    def run(self, key: Hashable, function: Callable[[], Found]) -> Found:
        """Runs or replays the work of a key, whose function must always have the same constants."""
        if self.capture is None:
            return function()
        recording = self._graphs.get(key) or self._recorded(key, function)
        if recording is not None:
            recording.replay()
            self.counters.replays += 1
            return cast(Found, recording.found)
        self.counters.eager_parts += 1
        found = function()
        self._warm.add(key)
        return found

    def clear(self) -> None:
        """Drops all graphs after memory ran out beside them, and halves the limit.

        Keys still used are captured again, refused ones included.
        """
        held = self.counters.graph_bytes
        self.limit_bytes = min(self.limit_bytes, held // 2)
        log.warning(
            "out of memory beside graphs of %s bytes: they may hold half of it", f"{held:,}"
        )
        self._refused.clear()
        self._drop()

    def _drop(self) -> None:
        if self.capture is not None:
            self.capture.forget()
        self._graphs.clear()
        self.counters.graph_bytes = 0

    def _recorded(self, key: Hashable, function: Callable[[], Any]) -> Recording | None:
        if self.capture is None or self._is_over or key in self._refused or key not in self._warm:
            return None
        held, limit = self.counters.graph_bytes, f"{self.limit_bytes:,}"
        if held >= self.limit_bytes:
            self._refuse(key, f"graphs hold {held:,} of {limit} bytes")
            return None
        recording, reason = _tried(self.capture, function)
        if recording is None:
            # A failed capture's memory stays in the pool while a graph of it lives, and the eager
            # run needs that memory.
            self._drop()
            self._is_over = "out of memory" not in reason  # e.g. experts counted on the host
            more = "; this loop captures nothing from now on" if self._is_over else ""
            self._refuse(key, reason + more)
            return None
        self.counters.captures += 1
        if held + recording.num_bytes > self.limit_bytes:
            needed = f"{held + recording.num_bytes:,}"
            del recording
            self._drop()
            self._refuse(key, f"with it graphs would hold {needed} of {limit} bytes")
            return None
        self.counters.graph_bytes += recording.num_bytes
        self._graphs[key] = recording
        return recording

    def _refuse(self, key: Hashable, reason: str) -> None:
        self._refused.add(key)
        self.counters.failed_captures += 1
        log.warning("no graph for %s, which runs eagerly: %s", key, reason)


def _tried(capture: Capture, function: Callable[[], Any]) -> tuple[Recording | None, str]:
    """A capture, or why it failed, in words: an error's traceback would keep the memory alive."""
    try:
        return capture.record(function), ""
    except RuntimeError as failure:  # bound to no other name, for the same reason
        return None, reason_of(failure)


def reason_of(error: RuntimeError) -> str:
    """The first error of a failed capture, in a line; ending the capture raised the others."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    is_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    return f"{'out of memory: ' * is_memory}{type(error).__name__}: {first_line(error)}"


def bucket_of(num_rows: int, num_slots: int) -> int:
    """Rows of the graph for a number of requests: the next power of two, or all slots."""
    return min(1 << (num_rows - 1).bit_length(), num_slots)


def token_tiers(most: int, least: int = 1) -> tuple[int, ...]:
    """Ascending sizes of verifications, in tokens: powers of two from `least` on, then `most`."""
    steps = (1 << n for n in range((least - 1).bit_length(), most.bit_length()))
    return tuple(sorted({step for step in steps if least <= step < most} | {most}))


class TierChoice:
    """The tier of the next round, chosen by the needs of the last ones.

    The host does not know this round's need yet; the device cuts a larger batch to the tier's
    likeliest nodes. The tier covers the largest need per request of the last rounds, as requests
    may have joined or left since.
    """

    def __init__(self) -> None:
        self._needs: deque[float] = deque(maxlen=REMEMBERED)

    def choose(self, tiers: tuple[int, ...], num_rows: int, known: int | None = None) -> int:
        """The smallest tier that covers the known or expected need; the largest at first."""
        expected = ceil(num_rows * max(self._needs)) if self._needs else tiers[-1]
        need = expected if known is None else known
        return tiers[min(bisect_left(tiers, need), len(tiers) - 1)]

    def note(self, num_tokens: int, num_rows: int) -> None:
        """Records the tokens that a round would have verified uncut."""
        self._needs.append(num_tokens / num_rows)
