"""What recording costs decoding: the same prompts with and without an observer, interleaved.

    python benchmarks/bench_collect.py                 # the embedded pair, 3 minutes on 2 cores
    python benchmarks/bench_collect.py --device cuda   # and rounds of the 8B shape, 1 minute

Prediction (CPU): the decoding thread only enqueues, some 20 µs a round; the rest is the second
core's work, visible only through the interpreter lock. Target: under 3 % of decode wall time on
the CPU pair, under 1 % on CUDA.

Prediction (H200, 8B shape, bf16, eagle2 of 60 nodes): a round reads 16 GB of weights, 3.8 ms. An
event, a clone of 15 MB of logits (7 µs of the device) and a queue: 15 µs of the decoding thread,
0.4 %. One pass over the logits of the 30 parents on the side stream, some 20 µs of a quarter of
the chip, and a copy of 35 kB: 0.2 %. Batch 8: the same thread, eight times the logits: 0.5 %.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from collect_rounds import HAS_PARQUET, line, measured, recording
from common import parser, report, requests_of

from specctl.collect.recorder import RecorderConfig, TraceRecorder
from specctl.policy import Policy
from specctl.runtime.api import Decoder
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.policy_spec import resolve_policy
from specctl.runtime.requests import Request, RoundRecord


def timed(loop: DecodeLoop, request: Request) -> tuple[float, int]:
    """Seconds and rounds of one request."""
    start = time.perf_counter()
    [done] = loop.run([request])
    return time.perf_counter() - start, done.metrics.calls


class Timed:
    """Passes rounds on to a recorder, and adds up what that takes the decoding thread."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self.recorder, self.seconds = recorder, 0.0

    def on_round(self, record: RoundRecord) -> None:
        start = time.perf_counter()
        self.recorder.on_round(record)
        self.seconds += time.perf_counter() - start


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--policy", default="eagle2", help="static policy")
    options.add_argument("--repeats", type=int, default=3, help="passes over the prompts")
    options.add_argument("--when-full", default="block", help="block or drop")
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    pair = load_pair("embedded", "embedded", device=options.device, dtype=options.dtype)
    policy = resolve_policy(options.policy, pair.fingerprint).policy
    requests = requests_of(pair, options)
    room = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    rows, close_s = measure(pair, policy, requests, room, options)
    for batch_size in (1, 8):
        rows += measured(pair, requests[0], batch_size, device, options.when_full)
    text = (
        f"recording costs {rows[1]['cost_percent']:.2f} % of decode wall time, of which "
        f"{rows[1]['on_round_percent']:.2f} % in the decoding thread, and {close_s:.2f} s to "
        f"close; embedded pair, {options.policy}, {options.dtype}, {options.device}, "
        f"{len(requests)} prompts x {options.repeats} passes, {options.threads} threads; "
        "below it rounds without a model, see collect_rounds.py"
        + ("" if HAS_PARQUET else "; no pyarrow here: rows reached the host and were not written")
    )
    report("collect", rows, options, text)


def measure(
    pair: Pair, policy: Policy, requests: list[Request], room: int, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """Rows without and with recording, and the seconds that closing the recorder took."""
    seconds, rounds = {"bare": 0.0, "recorded": 0.0}, 0
    with recording(pair, policy, RecorderConfig(when_full=options.when_full)) as recorder:
        observer = Timed(recorder)
        # Only one loop at a time holds a model's memory.
        other = load_pair("embedded", "embedded", device=options.device, dtype=options.dtype)
        loops = {
            "bare": Decoder(other, policy).loop_for(room),
            "recorded": Decoder(pair, policy, observer=observer).loop_for(room),
        }
        for name in loops:
            timed(loops[name], requests[0])
        observer.seconds = 0.0
        for number in range(options.repeats):
            for index, request in enumerate(requests):
                order = sorted(loops, reverse=bool((number + index) % 2))
                for name in order:
                    spent, count = timed(loops[name], request)
                    seconds[name] += spent
                rounds += count
            # One prompt is one commit, so each pass may finish it once only.
            if number == 0:
                for request in requests:
                    recorder.finish_prompt(request.prompt_id)
        start = time.perf_counter()
        recorder.close()
        close_s = time.perf_counter() - start
    bare_s, lost = seconds["bare"], recorder.losses.num_prompts
    bare = line("embedded pair, bare", bare_s, rounds, bare_s, 0.0, 0)
    recorded = seconds["recorded"]
    return [
        bare,
        line("embedded pair, recorded", recorded, rounds, bare_s, observer.seconds, lost),
    ], close_s


if __name__ == "__main__":
    main()
