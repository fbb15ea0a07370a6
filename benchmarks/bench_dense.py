"""Trees per second of dense collection against live collection: same prompts, same tree support.

Two live sides, both writing traces at batch 1: `full`, whose every node is verified, which is the
information that a dense log holds; and eagle2, which verifies 48 of 329 drafted nodes and is what
a user runs today. The dense side reads the responses of those very prompts from a file and drafts
the same levels and children; generating the responses is timed apart.

Prediction (CPU, one thread at 100 GFLOP/s): drafting 41 rows of the head costs 0.125 GFLOP a tree
and reading the text 0.03, together 1.6 ms; top-k, softmax, attention, labels and Parquet about 1 ms
more. A live eagle2 round takes 23 ms (bench_decode), so 9 to 10 times for eagle2, and some 30 times
for `full`, which verifies seven times as many nodes. The small drafter has less arithmetic, but its
rows of logits have 4096 tokens instead of 2560: about the same.

Prediction (H200, Llama-3.1-8B with its EAGLE-3 head, bf16): the rows below, from bytes and
operations alone (4.3 TB/s and 700 TFLOP/s achieved): live rounds of
one request read all weights for one tree, dense drafting is bound by arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import parser, report

from specctl.collect.dense import collect_dense
from specctl.collect.dense.collection import generate
from specctl.collect.live import collect_live
from specctl.collect.prompts import Prompt, load_prompts
from specctl.collect.responses import load_responses
from specctl.policy import FullTree, Policy, RootOnly, StaticTree
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import DecodeSettings
from specctl.runtime.load import Pair, load_pair

PLAIN = Policy(shape=RootOnly())
SHAPE = FullTree(depth=6, top_k=8, nested=False)
LIVE = {
    "live full, all verified": Policy(shape=SHAPE),
    "live eagle2 6-8-48": Policy(shape=StaticTree(depth=6, top_k=8, num_tokens=48)),
}
DENSE, DENSE_DEFAULT = "dense 6-8", "dense 11-10 nested"
GENERATING = "generating the texts, ar, batch 8"
GROUPS = 4
"""Prompts are timed in groups, the systems taking turns, so that a busy machine hits all alike."""

TARGET_WEIGHTS = 8.03e9
"""Llama-3.1-8B."""
HEAD_WEIGHTS = (
    4096 * (2 * 4096 + 4096) + 8192 * 2048 + 3 * 4096 * 14336 + 32000 * 4096 + 4096 * 4096
)
"""Its EAGLE-3 head: q and o, k and v, MLP, draft vocabulary; without `fc`, paid once a token."""
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 700e12


def drafted_rows(shape: FullTree) -> int:
    """Rows of logits of one tree: the root's, then the frontier's."""
    return 1 + (shape.depth - 1) * (shape.width or shape.top_k)


def seconds_of(num_tokens: int, weights: float) -> float:
    """A forward in bf16: the weights are read once, each token multiplies with all of them."""
    return max(2 * weights / BYTES_PER_S, 2 * num_tokens * weights / FLOPS_PER_S)


def predicted() -> list[dict[str, Any]]:
    """Trees per second on an H200, without launches, which only live rounds feel."""
    levels, rows = SHAPE.depth, drafted_rows(SHAPE)
    drafting = sum(seconds_of(n, HEAD_WEIGHTS) for n in [1] + [SHAPE.top_k] * (levels - 1))
    pool = 1 + SHAPE.top_k + (levels - 1) * SHAPE.top_k**2
    live = {
        "live full, all verified": drafting + seconds_of(pool, TARGET_WEIGHTS),
        "live eagle2 6-8-48": drafting + seconds_of(48, TARGET_WEIGHTS),
    }
    statistics = 8 * 4 * rows * 32000 / BYTES_PER_S  # eight passes over float32 logits
    # Chunks of a hundred positions: weights are read once for all of them, arithmetic decides.
    dense = (seconds_of(100 * rows, HEAD_WEIGHTS) + seconds_of(100, TARGET_WEIGHTS)) / 100
    rates = {**{name: 1 / s for name, s in live.items()}, DENSE: 1 / (dense + statistics)}
    return [
        row("predicted, H200, Llama-3.1-8B + EAGLE-3", name, rate, rates)
        for name, rate in rates.items()
    ]


def row(where: str, name: str, rate: float, rates: dict[str, float]) -> dict[str, Any]:
    """One line of the table; the ratio is dense over this system."""
    return {
        "system": f"{where}: {name}",
        "trees_per_s": rate,
        "ms_per_tree": 1e3 / rate,
        "dense_over_it": rates[DENSE] / rate,
    }


def measured(drafter: str, prompts: Sequence[Prompt], options: argparse.Namespace) -> list[Any]:
    """Trees and seconds of every system on one pair."""
    pair = load_pair("embedded", drafter, device=options.device, dtype=options.dtype)
    settings = DecodeSettings(options.max_new_tokens)
    totals = {name: [0, 0.0] for name in (*LIVE, DENSE, DENSE_DEFAULT, GENERATING)}
    run(pair, prompts[:1], settings, totals)  # warm
    totals = {name: [0, 0.0] for name in totals}
    for group in range(min(GROUPS, len(prompts))):
        order = sorted(totals, reverse=bool(group % 2))
        run(pair, prompts[group::GROUPS], settings, {name: totals[name] for name in order})
    rates = {name: trees / seconds for name, (trees, seconds) in totals.items()}
    return [row(f"embedded pair, {drafter}", name, rate, rates) for name, rate in rates.items()]


def run(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    totals: dict[str, list[Any]],
) -> None:
    """Adds trees and seconds of one group of prompts to every system's total."""
    with tempfile.TemporaryDirectory() as folder:
        responses, num_trees, generate_s = texts(pair, prompts, settings, Path(folder))
        for name, total in totals.items():
            if name == GENERATING:
                total[0] += num_trees
                total[1] += generate_s
                continue
            start, out = time.perf_counter(), Path(folder) / name
            total[0] += collect(name, pair, prompts, settings, responses, out)
            total[1] += time.perf_counter() - start


def collect(
    name: str,
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    responses: Path,
    out: Path,
) -> int:
    """Trees that a system wrote."""
    if name in LIVE:
        return collect_live(pair, prompts, LIVE[name], settings, out).metrics.calls
    shape = SHAPE if name == DENSE else FullTree()
    given = load_responses(responses)
    return collect_dense(pair, prompts, settings, out, shape, responses=given).num_trees


def texts(
    pair: Pair, prompts: Sequence[Prompt], settings: DecodeSettings, folder: Path
) -> tuple[Path, int, float]:
    """A file with the target's responses, how many trees they have, seconds to generate them."""
    start = time.perf_counter()
    answered = list(generate(Decoder(pair, PLAIN, batch_size=8), prompts, settings))
    seconds = time.perf_counter() - start
    ids = {text.prompt_id: [list(ids) for _, ids in text.answers] for text in answered}
    lines = [json.dumps({"prompt_id": name, "token_ids": turns}) for name, turns in ids.items()]
    path = folder / "responses.jsonl"
    path.write_text("\n".join(lines))
    return path, sum(len(turn) - 1 for turns in ids.values() for turn in turns), seconds


def main() -> None:
    known = parser(__doc__ or "")
    # All cores, as `specctl collect` unless told: wide products share out, a live round does not.
    known.set_defaults(threads=os.cpu_count())
    options = known.parse_args()
    torch.set_num_threads(options.threads)
    every = load_prompts(options.prompts)
    prompts = every[:: max(1, len(every) // options.num_prompts)][: options.num_prompts]
    rows = [
        line
        for drafter in ("embedded:eagle3", "embedded:small")
        for line in measured(drafter, prompts, options)
    ]
    text = (
        f"trees per second, {options.dtype}, {options.device}, {options.threads} threads, "
        f"{len(prompts)} prompts x {options.max_new_tokens} new tokens, greedy, batch 1; "
        "responses given to the dense side; Parquet on disk on both"
    )
    report("dense", rows + predicted(), options, text)


if __name__ == "__main__":
    main()
