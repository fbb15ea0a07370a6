"""What recording costs decoding: the same prompts with and without an observer, interleaved.

The decoding thread only enqueues a round; the rest is another thread's work, visible through the
interpreter lock. Target: under 3 % of decode wall time on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import parser, report, requests_of

from specctl.collect.live import header_of
from specctl.collect.rounds import TraceRecorder
from specctl.collect.trace_writer import TraceWriter
from specctl.policy import Policy
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import Pair, load_pair
from specctl.runtime.requests import Request, RoundRecord
from specctl.runtime.words import resolve_policy


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
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    pair = load_pair("embedded", "embedded", device=options.device, dtype=options.dtype)
    policy = resolve_policy(options.policy, pair.fingerprint).policy
    requests = requests_of(pair, options)
    room = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    rows, close_s = measure(pair, policy, requests, room, options)
    text = (
        f"recording costs {rows[1]['cost_percent']:.2f} % of decode wall time, of which "
        f"{rows[1]['on_round_percent']:.2f} % in the decoding thread, and {close_s:.2f} s to "
        f"close; embedded pair, {options.policy}, {options.dtype}, {options.device}, "
        f"{len(requests)} prompts x {options.repeats} passes, {options.threads} threads"
    )
    report("collect", rows, options, text)


def measure(
    pair: Pair, policy: Policy, requests: list[Request], room: int, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """Rows without and with recording, and the seconds that closing the recorder took."""
    seconds, rounds = {"bare": 0.0, "recorded": 0.0}, 0
    with recording(pair, policy) as recorder:
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
    bare_s = seconds["bare"]
    bare = line("embedded pair, bare", bare_s, rounds, bare_s, 0.0)
    recorded = seconds["recorded"]
    return [
        bare,
        line("embedded pair, recorded", recorded, rounds, bare_s, observer.seconds),
    ], close_s


@contextmanager
def recording(pair: Pair, policy: Policy) -> Iterator[TraceRecorder]:
    """A recorder into a folder that is thrown away."""
    with (
        tempfile.TemporaryDirectory() as folder,
        TraceWriter.open(
            Path(folder) / "traces", header_of(pair, policy, DecodeSettings(64))
        ) as out,
        TraceRecorder(out) as recorder,
    ):
        yield recorder


def line(
    system: str, seconds: float, rounds: int, bare_s: float, inside_s: float
) -> dict[str, Any]:
    """One row of the table; `on_round` is what the decoding thread itself spends on recording."""
    return {
        "system": system,
        "seconds": seconds,
        "rounds": rounds,
        "us_per_round": 1e6 * seconds / rounds,
        "cost_percent": 100 * (seconds / bare_s - 1),
        "on_round_us": 1e6 * inside_s / rounds,
        "on_round_percent": 100 * inside_s / bare_s,
    }


if __name__ == "__main__":
    main()
