"""A round of an 8B pair on this GPU: milliseconds, its floor by bytes, and transformers beside it.

    export PYTHONPATH=.:benchmarks
    python scripts/gpu/headline.py --budget-s 115 --out DIR    on CUDA
    python scripts/gpu/headline.py --small --device cpu        a few rounds of tiny models

Weights are random (`benchmarks/decode_8b`): times are those of the shapes, a round emits about one
token, and texts mean nothing. Columns:

    floor_ms     weights and cached text, read once at the copy bandwidth of the same run
    of_floor     the round over its floor
    pays_from    the round over plain decoding's, both in graphs: the acceptance length from which
                 the policy is faster than plain decoding

Rows come in the order of their weight. Each is printed and written when it is known, and none is
begun that would not end within the budget. Predictions to hold them against are in docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_cuda_decode import SMALL_COUNTS, Budget
from decode_8b.measuring import Counts, Job, timed
from decode_8b.pair import SIZES, random_pair
from decode_8b.policies import policies
from decode_8b.running import Cell
from kernels.timing import copy_bandwidth, machine, print_table

from specctl.replay.cost.probe import random_tokens
from specctl.runtime.attention import ATTENTION
from specctl.runtime.drafter import Eagle3Drafter
from specctl.runtime.load import Pair

Row = dict[str, Any]
COUNTS = Counts(warm=12, timed=40, lapped=5, learned=0, profiled=0)
CONTEXT, SMALL_CONTEXT = 1024, 32
PLAN: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (1, "graphs", ("ar", "eagle2", "chain", "hetero", "echo", "c2t")),
    (1, "eager", ("ar", "eagle2", "chain")),
    (1, "generate", ()),
    (1, "torch rules", ("c2t", "echo")),
    (8, "graphs", ("ar", "eagle2", "echo")),
    (32, "graphs", ("ar", "eagle2", "echo")),
    (8, "eager", ("ar", "eagle2")),
)
"""Batch size, mode and first words of the policies' names; modes are those of `decode_8b`, and
transformers' `generate`."""
COLUMNS = (
    "system", "batch", "mode", "ms", "min_ms", "max_ms", "floor_ms", "of_floor", "pays_from",
    "verified", "levels", "captures", "late_captures", "failed_captures", "skipped",
)  # fmt: skip


def bytes_read(pair: Pair, row: Row, context: int) -> int:
    """Bytes that a round reads at least: the weights of every pass, and the cached text.

    A round is one pass of the target, one of the head over what was committed, and one of the head
    for every drafted level behind the first.
    """
    model, drafter = pair.target.model.model, pair.drafter
    assert isinstance(drafter, Eagle3Drafter)
    head, config = drafter.head, model.config
    embedding = model.get_input_embeddings().weight  # a few rows of it are read
    target = sum(part.nbytes for part in model.parameters() if part is not embedding)
    block = sum(
        part.weight.nbytes for part in (head.qkv, head.o_proj, head.gate_up, head.down_proj)
    )
    entry = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    text = row["batch"] * context * entry
    total: int = target + config.num_hidden_layers * text
    levels = row.get("levels", 0.0)
    if levels:
        reading = block + head.fc.weight.nbytes + head.lm_head.weight.nbytes + text
        total += reading + round((levels - 1) * (block + head.lm_head.weight.nbytes + text))
    return total


def generate_row(pair: Pair, context: int, *, small: bool) -> Row:
    """Milliseconds a token of transformers' `generate`, plain and greedy, on the same weights."""
    model = pair.target.model.model
    pair.target.model.capture(())
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([random_tokens(pair, context, seed=0)], device=model.device)
    num_tokens, repeats = (4, 1) if small else (32, 3)

    def seconds(count: int) -> float:
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    try:
        with torch.inference_mode():
            seconds(2)  # warm
            times = [seconds(1 + num_tokens) - seconds(1) for _ in range(repeats)]
    finally:
        model.set_attn_implementation(ATTENTION)
    ms = [1e3 * spent / num_tokens for spent in times]
    return {"ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms)}


def policy_row(job: Job, pair: Pair, counts: Counts) -> Row:
    """A policy's row of `decode_8b`, in milliseconds."""
    found = timed(job, pair, counts)
    if found.get("failed_captures"):
        raise RuntimeError(f"{found['failed_captures']} failed captures: not a row of graphs")
    names = {"ms": "round_us", "min_ms": "min_us", "max_ms": "max_us"}
    return found | {ms: found[us] / 1e3 for ms, us in names.items()}


def attempt(work: Callable[[], Row]) -> Row:
    """A row, or why there is none: the other rows go on."""
    try:
        return work()
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


class Table:
    """The rows so far, printed and written as they come."""

    def __init__(self, pair: Pair, about: Row, context: int, path: Path | None) -> None:
        self.pair, self.about, self.context, self.path = pair, about, context, path
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Adds a row, with what its time compares to."""
        if "ms" in row:
            row["floor_ms"] = bytes_read(self.pair, row, self.context) / self.about["copy"] / 1e3
            row["of_floor"] = row["ms"] / row["floor_ms"]
            plain = [
                other["ms"] for other in (*self.rows, row)
                if (other["system"], other["mode"]) == ("ar", "graphs")
                and other["batch"] == row["batch"] and "ms" in other
            ]  # fmt: skip
            if plain and row["mode"] in ("graphs", "torch rules"):
                row["pays_from"] = row["ms"] / plain[0]
        self.rows.append(row)
        shown = {name: row[name] for name in COLUMNS if name in row}
        words = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
        print(*words, sep="  ", flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.about | {"rows": self.rows}, indent=1)
            self.path.write_text(text + "\n", "utf-8")


def main() -> int:
    given = _options()
    device, budget, small = torch.device(given.device), Budget(given.budget_s), given.small
    torch.set_num_threads(1)
    counts, context = (SMALL_COUNTS, SMALL_CONTEXT) if small else (COUNTS, CONTEXT)
    copy, size = copy_bandwidth(device, small=small), SIZES["tiny" if small else "8b"]
    pair = random_pair(size, device)
    print(f"copy {copy / 1e3:.0f} GB/s; the pair is ready after {budget.spent:.0f} s", flush=True)
    about = {
        "machine": machine(device) | {"transformers": transformers.__version__},
        "shape": size.name,
        "context": context,
        "rounds": counts.timed,
        "copy": copy,
    }
    path = given.out and given.out / f"cuda_headline-{device.type}.json"
    table = Table(pair, about, context, path)
    for batch, mode, words in PLAN:
        works: dict[str, Callable[[], Row]] = {}
        if mode == "generate":
            works["transformers generate"] = partial(generate_row, pair, context, small=small)
        for name, policy in policies(batch).items():
            if words and name.startswith(words):
                job = Job(name, policy, Cell(batch, context), mode)
                works[name] = partial(policy_row, job, pair, counts)
        for name, work in works.items():
            labels = {"system": name, "batch": batch, "mode": mode}
            table.add(labels | budget.run(mode, partial(attempt, work)))
    print(
        f"\n{size.name} shape, random weights, {context} tokens of text, greedy, medians of "
        f"{counts.timed} rounds, {about['machine']['device']}; {budget.spent:.0f} s\n"
    )
    print_table([{name: row[name] for name in COLUMNS if name in row} for row in table.rows])
    failed = [row for row in table.rows if "Error" in row.get("skipped", "")]
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda", help="cuda or cpu")
    options.add_argument("--small", action="store_true", help="tiny models and few rounds")
    options.add_argument("--budget-s", type=float, default=115.0, help="seconds for all rows")
    options.add_argument("--out", type=Path, help="folder for the JSON")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
