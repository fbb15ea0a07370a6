"""What the profiler saw of some rounds: device work, who launched it, and the marks around that.

torch.profiler's trace names for each kernel the call that launched it, by a correlation id, and
kernels inside a CUDA graph carry the id of the graph's launch. So a kernel belongs to the marks
that its launch stands between, whenever the device came to run it.

On a CPU the operators themselves are the work, so that all of this runs there too.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from specctl.runtime.cached_model import CachedModel
from specctl.runtime.capture import GraphCache
from specctl.runtime.drafter import Eagle3Drafter
from specctl.runtime.requests import Stopwatch
from specctl.runtime.round import Round

from .running import clocked

LAP, CALL, GRAPH = "bench lap ", "bench call ", "bench graph "
CALLS: tuple[tuple[type, tuple[str, ...], str], ...] = (
    (Round, ("upload",), "commit"),
    (Eagle3Drafter, ("root_logits", "level", "read"), "draft"),
    (CachedModel, ("forward",), "verify"),
)
GRAPH_LAUNCH = "cudaGraphLaunch"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Work:
    """A kernel, copy or fill on the device; on a CPU an operator.

    Attributes:
        start_us, end_us: of the work itself. launched_us: on the host, when it was asked for; None
            if the trace does not say. call: what asked for it. correlation: id of that call.
    """

    name: str
    start_us: float
    end_us: float
    launched_us: float | None
    call: str
    correlation: int
    is_kernel: bool

    @property
    def us(self) -> float:
        return self.end_us - self.start_us

    @property
    def is_replay(self) -> bool:
        """It is one node of a graph."""
        return self.call.startswith(GRAPH_LAUNCH)


@dataclass(frozen=True)
class Mark:
    """A stretch of host time under a name of ours."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Trace:
    """Work in order of its start, marks in order of theirs; `num_waits` by the host."""

    work: list[Work]
    marks: list[Mark]
    num_waits: int

    def under(self, prefix: str) -> list[Mark]:
        """The marks of one kind, their prefix cut off."""
        return [
            Mark(mark.name.removeprefix(prefix), mark.start_us, mark.end_us)
            for mark in self.marks
            if mark.name.startswith(prefix)
        ]


def traced(
    step: Callable[[], object], device: torch.device, *, behind_prompts: bool = False
) -> Trace:
    """Profiles whatever `step` does.

    Args:
        behind_prompts: begin with the first part of a captured round, after prompts were read.
    """
    # Older drivers crash where CUPTI is torn down beside graphs that are still alive.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    with marked(), started(profiler) if behind_prompts else profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return read_trace(events, on_host=device.type == "cpu")


@contextmanager
def started(profiler: profile) -> Iterator[None]:
    """Starts it at the first part of a captured round; a trace of many prompts would be long."""
    run = GraphCache.run
    begin = cache(profiler.start)

    def first(*args: Any, **options: Any) -> Any:
        begin()
        return run(*args, **options)

    with mock.patch.object(GraphCache, "run", first):
        yield
    profiler.stop()


def read_trace(events: Iterable[dict[str, Any]], *, on_host: bool = False) -> Trace:
    """Of a Chrome trace's events, times in us."""
    timed = [event for event in events if "dur" in event]
    calls = {
        event["args"]["correlation"]: event
        for event in timed
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }
    work = [_work(event, calls) for event in timed if event.get("cat") in _ON_DEVICE]
    if on_host:
        work = _operators(timed)
    marks = [
        Mark(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in timed
        if event.get("cat") == "user_annotation"
    ]
    num_waits = sum(event["name"].startswith(WAITS) for event in calls.values())
    return Trace(
        sorted(work, key=lambda w: w.start_us), sorted(marks, key=lambda m: m.start_us), num_waits
    )


def _work(event: dict[str, Any], calls: dict[int, dict[str, Any]]) -> Work:
    correlation = int(event.get("args", {}).get("correlation", -1))
    call = calls.get(correlation)
    return Work(
        name=event["name"],
        start_us=event["ts"],
        end_us=event["ts"] + event["dur"],
        launched_us=call["ts"] if call else None,
        call=call["name"] if call else "",
        correlation=correlation,
        is_kernel=event["cat"] == "kernel",
    )


def _operators(timed: Iterable[dict[str, Any]]) -> list[Work]:
    """Operators that no other one called, as if each were launched by itself."""
    found: list[Work] = []
    events = (event for event in timed if event.get("cat") == "cpu_op")
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        if not found or start >= found[-1].end_us:
            found.append(Work(event["name"], start, end, start, "", len(found), is_kernel=True))
    return found


class MarkClock(Stopwatch):
    """A stopwatch whose laps stand in the profiler's trace."""

    def __init__(self) -> None:
        super().__init__()
        self.lap("other")  # what came since the last round's last lap

    def lap(self, phase: str) -> None:
        super().lap(phase)
        with record_function(LAP + phase):
            pass


@contextmanager
def marked() -> Iterator[None]:
    """Has laps, the calls of `CALLS` and the key of every part of a round stand in the trace."""
    with ExitStack() as stack:
        stack.enter_context(clocked(MarkClock, []))
        for owner, names, phase in CALLS:
            for name in names:
                stack.enter_context(_patched(owner, name, lambda *_, p=phase: CALL + p))
        stack.enter_context(_patched(GraphCache, "run", lambda key, *_: f"{GRAPH}{key}"))
        yield


def _patched(owner: type, name: str, mark_of: Callable[..., str]) -> Any:
    method = getattr(owner, name)

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with record_function(mark_of(*args)):
            return method(self, *args, **options)

    return mock.patch.object(owner, name, call)
