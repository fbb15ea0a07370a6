"""How fast a log answers: replay, summaries and sweeps, beside running the pair again.

A synthetic dense trace (C2T's 1,011 nodes a position) is read from Parquet, from front to back, as
`specctl replay` does; the alternative of a user is one live run per setting. Throughput is of all
logged node rows, whether a policy looks at them or not, and of positions (output tokens).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from scripts.synthetic_trace import write
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import DenseLog
from specctl.policy import Chain, EntropyBins, FullTree, Policy, RootOnly, StaticTree
from specctl.progress import set_chunk_threads
from specctl.replay.rounds import replay, walk
from specctl.replay.static import Summary, static_outcomes, summarise
from specctl.runtime.api import Decoder
from specctl.runtime.load import load_pair

POLICIES = {
    "ar": RootOnly(),
    "chain 4": Chain(num_draft_tokens=4),
    "eagle2 6-8-48": StaticTree(),
    "eagle2 11-10-60": StaticTree(depth=11, top_k=10, num_tokens=60),
    "hetero on 6-8-48": EntropyBins(base=StaticTree(), edges=(5.0, 6.0, 7.0, 8.0)),
}
NUM_SWEPT_POSITIONS = 1_000_000


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--num-nodes", type=float, default=2e7, help="node rows of the log")
    options.add_argument("--repeats", type=int, default=3, help="the best of so many runs counts")
    given = options.parse_args()
    torch.set_num_threads(1)
    set_chunk_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder) / "traces"
        write(traces, FullTree(nested=False), int(given.num_nodes), prompts_per_commit=8, seed=0)
        log = DenseLog.open(TraceSet.open(traces, verify=False))
        rows = [live_row(given), *replay_rows(log, given), *summary_rows(log, given)]
    note = f"replay from Parquet, {given.threads} threads; synthetic, {given.num_nodes:.3g} nodes"
    common.report("replay", rows, given, note)


def row(system: str, positions: float, nodes: float | None, seconds: float) -> dict[str, Any]:
    return {
        "system": system,
        "positions": int(positions),
        "seconds": seconds,
        "positions_per_s": positions / seconds,
        "million_node_rows_per_s": "-" if nodes is None else nodes / seconds / 1e6,
    }


def best_of(repeats: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest run: other work on the machine only ever adds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def live_row(given: argparse.Namespace) -> dict[str, Any]:
    """What a user does instead: run the pair under the policy."""
    pair = load_pair("embedded", "embedded", device=given.device, dtype=given.dtype)
    decoder = Decoder(pair, Policy(shape=StaticTree()))
    requests = common.requests_of(pair, given)
    loop = decoder.loop(requests)
    list(loop.run(requests[:1]))
    began = time.perf_counter()
    tokens = sum(len(done.token_ids) for done in decoder.loop(requests).run(requests))
    seconds = time.perf_counter() - began
    return row("live, embedded pair, eagle2 6-8-48", tokens, None, seconds)


def replay_rows(log: DenseLog, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    positions, nodes = sizes(log)
    for name, shape in POLICIES.items():
        policy = Policy(shape=shape)
        seconds = best_of(given.repeats, lambda p=policy: replay(log, [p]))
        yield row(f"replay {name}", positions, nodes, seconds)
    together = [Policy(shape=shape) for shape in POLICIES.values()]
    seconds = best_of(given.repeats, lambda: replay(log, together))
    yield row(f"replay all {len(together)} in one pass", positions, nodes, seconds)


def sizes(log: DenseLog) -> tuple[int, int]:
    chunks = [(c.positions.num_rows, c.num_nodes) for c in log.chunks(extra=())]
    positions, nodes = (sum(column) for column in zip(*chunks, strict=True))
    return positions, nodes


def summary_rows(log: DenseLog, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    positions, nodes = sizes(log)
    found: list[Summary] = []

    def make() -> None:
        found[:] = [summarise(log, top_k=8)]

    yield row("summary, top_k 8, 11 levels", positions, nodes, best_of(given.repeats, make))
    grid = [(d, n) for d in range(1, 12) for n in (4, 8, 16, 32, 60)]
    tiled = repeated(found[0], NUM_SWEPT_POSITIONS)
    seconds = best_of(given.repeats, lambda: [sweep(tiled, d, n) for d, n in grid])
    swept = tiled.positions.num_rows * len(grid)
    yield row(f"sweep of {len(grid)} static settings, each counted", swept, None, seconds)


def sweep(summary: Summary, depth: int, num_tokens: int) -> tuple[int, int]:
    """Calls and verified tokens of one static setting."""
    outcomes = static_outcomes(summary, depth, num_tokens)
    visited = walk(summary.positions, outcomes.accepted + 1)
    return int(visited.sum()), int(outcomes.verified[visited].sum())


def repeated(summary: Summary, num_positions: int) -> Summary:
    """The same requests again and again, up to `num_positions`."""
    from specctl.logs.positions import join_rows

    times = max(1, num_positions // summary.positions.num_rows)
    return join_rows([summary] * times)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
