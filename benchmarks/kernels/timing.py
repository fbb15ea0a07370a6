"""What the kernels' benchmarks share: microseconds, bandwidth, the table.

On CUDA a call is captured in a graph and replayed between two events, as the decode loop runs it,
with the L2 filled by something else before each replay. The figure holds the start of a graph;
`launch_floor` says how much that is. On a CPU `perf_counter` does, so that every script can be
run to its end there (`--small`).

Needs torch alone: on the machine with the GPU there is nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from specctl.runtime.identity import hardware_name

Run = Callable[[], object]
Row = dict[str, Any]
COPY_BYTES = 1 << 30
REPEATS = 60
CPU_SECONDS = 0.2
"""For each figure on a CPU."""


class Timing(NamedTuple):
    """Time of a call.

    Attributes:
        us: median, microseconds. us_p90: nine of ten calls took no longer.
        how: `graph`, `eager` (it cannot be captured: the host's time may show), or `cpu`.
    """

    us: float
    us_p90: float
    how: str


def time_us(run: Run, device: torch.device, *, cold: bool = True) -> Timing:
    """Times a call; with `cold`, what it reads is not in the L2 (no difference on a CPU)."""
    if device.type == "cpu":
        return _cpu_time(run)
    replay, how = _replayable(run)
    flush = torch.ones(_l2_bytes(device) * 2 // 4, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, end in pairs:
        if cold:
            flush.sum()  # reads: lines written would go back to memory while the kernel runs
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize(device)
    return _timing([1e3 * start.elapsed_time(end) for start, end in pairs[5:]], how)


@cache
def copy_bandwidth(device: torch.device, *, small: bool = False) -> float:
    """Bytes a microsecond, read and written, of copying 1 GiB (16 MiB where `small`)."""
    source = torch.ones(COPY_BYTES // (64 if small else 1), dtype=torch.uint8, device=device)
    there = torch.empty_like(source)
    return 2 * source.numel() / time_us(lambda: there.copy_(source), device).us


def launch_floor(device: torch.device) -> Timing:
    """A kernel that does nothing, timed like all the others."""
    one = torch.zeros(1, device=device)
    return time_us(lambda: one.add_(1), device)


def row(timing: Timing, num_bytes: int, bandwidth: float, **shape: object) -> Row:
    """A line of the table: what was run, how long, and how near the memory's pace.

    Args:
        num_bytes: that must be read and written at least. bandwidth: of `copy_bandwidth`.
    """
    pace = num_bytes / timing.us
    figures = {"us": timing.us, "us_p90": timing.us_p90, "mbytes": num_bytes / 1e6}
    return {**shape, **figures, "gb_per_s": pace / 1e3, "of_copy": pace / bandwidth} | {
        "how": timing.how
    }


def versus(rows: Sequence[Row], ours: Row) -> list[Row]:
    """The rows of one shape, each with the times that ours would fit into it."""
    return [{**other, "ours_faster": other["us"] / ours["us"]} for other in rows]


def optional(name: str) -> ModuleType | None:
    """A library to compare with, where it is installed."""
    return import_module(name) if find_spec(name) is not None else None


def main(name: str, rows: Callable[..., list[Row]], description: str) -> None:
    """Runs a benchmark by itself: prints its table, and writes it where `--out` says."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--small", action="store_true", help="sizes that a CPU gets through")
    options.add_argument("--out", type=Path, help="folder for the JSON")
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    found = rows(device, small=chosen.small)
    print_table(found)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": machine(device), "rows": found}, indent=2)
        (chosen.out / f"{name}-{device.type}.json").write_text(text + "\n", "utf-8")


def machine(device: torch.device) -> dict[str, Any]:
    """Where the figures were measured."""
    triton = optional("triton")
    return {
        "device": hardware_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else None,
        "python": platform.python_version(),
        "measured": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def print_table(rows: Sequence[Row]) -> None:
    """Columns as wide as they need; a column that a row does not have stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([_word(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (word.rjust(width) for word, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _word(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_time(run: Run) -> Timing:
    run()
    times, began = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < CPU_SECONDS:
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    return _timing(times, "cpu")


def _timing(times: list[float], how: str) -> Timing:
    return Timing(statistics.median(times), statistics.quantiles(times, n=10)[-1], how)


def _replayable(run: Run) -> tuple[Run, str]:
    """The call as a graph; as it is, where it waits for the device or cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    if _waits(run):
        return run, "eager"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay, "graph"


def _waits(run: Run) -> bool:
    """Whether a call waits for the device. Its capture is not tried: torch before 2.12 captures
    nothing more in a process where one capture failed, so that all later rows were eager."""
    with warnings.catch_warnings():  # torch says once that its detector is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
