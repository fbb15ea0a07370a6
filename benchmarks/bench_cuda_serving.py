"""What a server meets at the shape of an 8B model: long prompts, long batches, full memory.

    python benchmarks/bench_cuda_serving.py            # on a GPU
    python benchmarks/bench_cuda_serving.py --small    # to its end on any machine

    prefill     time, peak memory and longest kernel of prompts at 2,048, 8,192 and 8,193 tokens
    batch       rounds of 32 requests behind 8,192 tokens, greedy and with top-p, with their memory
    recorder    rounds of 8 requests with and without a recorder
    growing     two calls, the second with longer texts: graphs that it had to make again
    memory      a first prompt without room: the refusal, and whether the request is there still

Weights are random (`decode_8b.pair`): times and bytes are those of the shapes, the text means
nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from decode_8b.pair import SIZES, random_pair
from kernels.timing import machine, print_table

from specctl.errors import DeviceMemoryError
from specctl.policy import Policy, StaticTree
from specctl.replay.cost.probe import random_tokens
from specctl.runtime.api import Decoder
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair
from specctl.runtime.requests import Request, RoundRecord, Sampling

Row = dict[str, Any]
TREE = Policy(shape=StaticTree())
NUM_ROUNDS, NUM_WARM = 20, 10
MOST_EMITTED = (NUM_ROUNDS + NUM_WARM) * 10


class Counted:
    """An observer that keeps nothing but the number of rounds."""

    def __init__(self) -> None:
        self.num_rounds = 0

    def on_round(self, record: RoundRecord) -> None:
        del record
        self.num_rounds += 1


def new_loop(pair: Pair, batch_size: int, context: int, observer: Any = None) -> DecodeLoop:
    return DecodeLoop(
        pair.target.model,
        pair.drafter,
        TREE,
        batch_size=batch_size,
        max_text_tokens=context + MOST_EMITTED,
        eos_ids=(),
        observer=observer,
    )


def fill(
    loop: DecodeLoop,
    pair: Pair,
    num: int,
    context: int,
    sampling: Sampling,
    new_tokens: int = MOST_EMITTED,
) -> None:
    for row in range(num):
        prompt = tuple(random_tokens(pair, context, seed=row))
        loop.submit(Request(f"{context}-{row}", prompt, new_tokens, sampling=sampling))


def round_us(loop: DecodeLoop, device: torch.device) -> float:
    """Median wall time of warm rounds; the host reads every round's tokens, so it has ended."""
    times = []
    for turn in range(NUM_WARM + NUM_ROUNDS):
        synchronise(device)
        began = time.perf_counter()
        loop.step()
        synchronise(device)
        if turn >= NUM_WARM:
            times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_of(device: torch.device) -> Row:
    """Peak since the last reset, and what is held now; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "held_bytes": torch.cuda.memory_allocated(device),
    }


def freed(pair: Pair, device: torch.device) -> None:
    """Gives back the memory of the loops before."""
    pair.target.model.cache = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def prefill(pair: Pair, device: torch.device, sizes: tuple[int, ...]) -> list[Row]:
    """A prompt of each size and its first token; the kernel that took longest."""
    rows = []
    activity = getattr(torch.profiler.ProfilerActivity, device.type.upper())
    time_of = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    for size in sizes:
        freed(pair, device)
        loop = new_loop(pair, 1, size)

        def read(loop: DecodeLoop = loop, size: int = size) -> float:
            fill(loop, pair, 1, size, Sampling(), new_tokens=1)
            synchronise(device)
            began = time.perf_counter()
            loop.step()
            synchronise(device)
            return 1e3 * (time.perf_counter() - began)

        read()  # compiles
        ms, memory = read(), memory_of(device)
        with torch.profiler.profile(activities=[activity]) as profiler:
            read()
        longest = max(profiler.key_averages(), key=attrgetter(time_of))
        rows.append({"tokens": size, "ms": ms, "longest": longest.key[:60], **memory})
    return rows


def batch(pair: Pair, device: torch.device, num: int, context: int) -> list[Row]:
    """Rounds of a full batch behind long texts, by kind of sampling."""
    rows = []
    for name, sampling in (("greedy", Sampling()), ("top-p", Sampling(0.8, top_p=0.9))):
        freed(pair, device)
        loop = new_loop(pair, num, context)
        fill(loop, pair, num, context, sampling)
        us = round_us(loop, device)
        counters = asdict(loop.graph_counters)
        rows.append({"sampling": name, "round_us": us, **counters, **memory_of(device)})
    return rows


def recorder(pair: Pair, device: torch.device, num: int, context: int) -> list[Row]:
    """Rounds with and without an observer that keeps nothing: what recording itself costs."""
    rows = []
    for observer in (None, Counted()):
        freed(pair, device)
        loop = new_loop(pair, num, context, observer)
        fill(loop, pair, num, context, Sampling())
        us = round_us(loop, device)
        rows.append({"observed": observer is not None, "round_us": us, **memory_of(device)})
    return rows


def growing(pair: Pair, device: torch.device, context: int) -> list[Row]:
    """Two calls of one decoder, the second with longer prompts."""
    freed(pair, device)
    decoder, rows = Decoder(pair, TREE), []
    for size in (context, context + context // 4):
        loop = decoder.loop_for(size + MOST_EMITTED)
        before = asdict(loop.graph_counters)
        fill(loop, pair, 1, size, Sampling())
        us = round_us(loop, device)
        captures = loop.graph_counters.captures - before["captures"]
        rows.append({"tokens": size, "round_us": us, "captures": captures})
        while loop.busy:
            loop.step()
    return rows


def memory(pair: Pair, device: torch.device, context: int) -> list[Row]:
    """A prompt while all other memory is taken: refused by name, then read once there is room.

    On CUDA alone; a CPU does not refuse.
    """
    if device.type != "cuda":
        return []
    freed(pair, device)
    loop = new_loop(pair, 1, context)
    fill(loop, pair, 1, context, Sampling())
    free, _ = torch.cuda.mem_get_info(device)
    taken = torch.empty(free - (64 << 20), dtype=torch.uint8, device=device)
    refused = ""
    try:
        loop.step()
    except DeviceMemoryError as error:
        refused = str(error)
    is_kept = loop.busy
    del taken
    torch.cuda.empty_cache()
    loop.step()
    read = sum(active.metrics.num_tokens for active in loop._active)
    return [{"refused": refused, "request_kept": is_kept, "tokens_afterwards": read}]


def main() -> None:
    given = _options()
    device = torch.device(given.device)
    small = given.small or device.type == "cpu"
    pair = random_pair(SIZES["tiny" if small else "8b"], device)
    long, num = (64, 2) if small else (8192, 32)
    sizes = (long // 4, long, long + 1)
    parts: dict[str, Callable[[], list[Row]]] = {
        "prefill": lambda: prefill(pair, device, sizes),
        "batch": lambda: batch(pair, device, num, long),
        "recorder": lambda: recorder(pair, device, max(1, num // 4), long // 8),
        "growing": lambda: growing(pair, device, long // 8),
        "memory": lambda: memory(pair, device, long // 4),
    }
    found: Row = {"machine": machine(device), "shape": "tiny" if small else "8b"}
    with torch.inference_mode(False):
        for name, measure in parts.items():
            found[name] = measure()
            print(f"\n{name}")
            if found[name]:
                print_table(found[name])
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"cuda_serving-{device.type}.json"
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
