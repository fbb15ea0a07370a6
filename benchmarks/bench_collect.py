"""What recording costs decoding: the same prompts with and without an observer, interleaved.

Prediction (CPU): the decoding thread only enqueues, some 20 µs a round; the rest is the second
core's work, visible only through the interpreter lock. Target: under 3 % of decode wall time on
the CPU pair, under 1 % on CUDA.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from common import parser, report, requests_of

from specctl.collect.live import header_of
from specctl.collect.recorder import TraceRecorder
from specctl.collect.store import TraceWriter
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.decode import DecodeLoop
from specctl.runtime.load import load_pair
from specctl.runtime.observe import Request
from specctl.runtime.policy_spec import resolve_policy


def timed(loop: DecodeLoop, request: Request) -> tuple[float, int]:
    """Seconds and rounds of one request."""
    start = time.perf_counter()
    [done] = loop.run([request])
    return time.perf_counter() - start, done.metrics.calls


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
    seconds, rounds, close_s = measure(pair, policy, requests, room, options.repeats)
    bare, recorded = seconds["bare"], seconds["recorded"]
    rows = [
        {"system": name, "seconds": s, "rounds": rounds, "us_per_round": 1e6 * s / rounds}
        for name, s in seconds.items()
    ]
    overhead = 100 * (recorded / bare - 1)
    text = (
        f"recording costs {overhead:.2f} % of decode wall time, and {close_s:.2f} s to close; "
        f"embedded pair, {options.policy}, {options.dtype}, {options.device}, "
        f"{len(requests)} prompts x {options.repeats} passes, {options.threads} threads"
    )
    report("collect", rows, options, text)


def measure(
    pair: object, policy: object, requests: list[Request], room: int, repeats: int
) -> tuple[dict[str, float], int, float]:
    """Seconds with and without recording, rounds of either, seconds to close the recorder."""
    header = header_of(pair, policy, DecodeSettings(requests[0].max_new_tokens))
    seconds, rounds = {"bare": 0.0, "recorded": 0.0}, 0
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter.open(Path(folder) / "traces", header)
        recorder = TraceRecorder(writer)
        loops = {
            "bare": Decoder(pair, policy).loop_for(room),
            "recorded": Decoder(pair, policy, observer=recorder).loop_for(room),
        }
        for name in loops:
            timed(loops[name], requests[0])
        for number in range(repeats):
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
        writer.close()
    return seconds, rounds, time.perf_counter() - start


if __name__ == "__main__":
    main()
