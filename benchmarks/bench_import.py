"""Imported per-position chains: reading the file, then replaying settings, beside plain Python.

A made-up log in the manner of SpecDecode-Bench (accepted lengths geometric, up to 20), 1,000
positions a request. The alternative of a user is a loop over positions in Python, as published
simulators have it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
import numpy as np

from specctl.logs.imported_log import ImportedLog
from specctl.logs.importing import ImportOptions, import_file
from specctl.replay.imported import replay_chain, replay_oracle

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
POSITIONS, OFFERED = 1000, 20


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0])
    options.add_argument("--num-requests", type=int, default=1000, help="requests of the log")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "log.jsonl"
        write_log(source, given.num_requests)
        rows = list(measure(source, Path(folder) / "imported", given))
    common.report("import", rows, given, "imported chains, made-up log, one thread")


def write_log(path: Path, num_requests: int) -> None:
    """Accepted draft tokens plus one, from every generated token; the first is the prefill."""
    generator = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_requests):
            lengths = np.minimum(generator.geometric(0.35, POSITIONS), OFFERED + 1)
            lengths = np.minimum(lengths, np.arange(POSITIONS, 0, -1))
            lengths[0] = 1
            row = {
                "id": f"r{number}",
                "prompt_token_ids": [1] * 20,
                "generated_token_ids": [2] * POSITIONS,
                "acc_eagle": {"acc_len": lengths.tolist()},
            }
            file.write(json.dumps(row) + "\n")


def measure(source: Path, out: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    depths = {"eagle": OFFERED}
    began = time.perf_counter()
    import_file(source, out, ImportOptions(offered_depths=depths))
    yield row("specctl import", given.num_requests * POSITIONS, time.perf_counter() - began)
    traces = ImportedLog.open(out)
    total, lengths = traces.positions.num_rows, traces.lengths("eagle")
    yield row("plain Python loop, one fixed K", total, timed(lambda: plain_calls(traces, 4)))
    fixed = timed(lambda: [replay_chain(lengths, length) for length in LENGTHS])
    yield row(f"specctl, {len(LENGTHS)} fixed K", total * len(LENGTHS), fixed)
    yield row("specctl, oracle", total, timed(lambda: replay_oracle(lengths)))
    calls = len(replay_chain(lengths, 4).request)
    assert calls == plain_calls(traces, 4), "both sides count the same rounds"


def timed(work: Any) -> float:
    """Seconds of the fastest of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def plain_calls(traces: ImportedLog, length: int) -> int:
    """Rounds of a fixed K, one position after the other."""
    accepted, calls = traces.num_accepted["eagle"].tolist(), 0
    for start, stop in pairwise(traces.positions.start.tolist()):
        here = start
        while here < stop:
            calls += 1
            here += min(accepted[here], length) + 1
    return calls


def row(system: str, positions: int, seconds: float) -> dict[str, Any]:
    return {
        "system": system,
        "positions": positions,
        "seconds": seconds,
        "million_positions_per_s": positions / seconds / 1e6,
    }


if __name__ == "__main__":
    main()
