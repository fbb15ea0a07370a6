"""What the forwards cost by themselves, and the speed-up that they allow.

Prediction for a strategy of D levels, width W and N verified nodes with mean acceptance length τ:

    speed-up = τ · T_target(1) / (T_extend + (D - 1) · T_draft(W) + T_target(N))

`bench_decode.py` measures what comes out. Medians of interleaved repeats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from common import parser, report
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from specctl.runtime.attention import Pass
from specctl.runtime.cached_model import CachedModel
from specctl.runtime.drafter import Drafter
from specctl.runtime.load import Pair, load_pair
from tests.trees import ancestor_mask

TARGET_SIZES = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, 8, 10)


def target_forward(model: CachedModel, context: int, size: int) -> Callable[[], None]:
    """One verification forward of a star of `size` nodes behind `context` tokens."""
    parent = torch.tensor([[-1] + [0] * (size - 1)], device=model.device)
    reads = trees_pass([context], [size], parent)
    return lambda: model.forward(reads) and None


def trees_pass(contexts: list[int], sizes: list[int], parent: Tensor) -> Pass:
    """Trees of these sizes behind texts of these lengths, end to end; parents are `[B, N]`."""
    device, rows = parent.device, torch.arange(len(sizes), device=parent.device)
    offsets = torch.tensor([0, *accumulate(sizes)], device=device)
    row = rows.repeat_interleave(offsets.diff())
    column = torch.arange(len(row), device=device) - offsets[row]
    prefixes, seen = torch.tensor(contexts, device=device), ancestor_mask(parent, max(sizes))
    return Pass(
        token_ids=torch.full_like(row, 7),
        position_ids=prefixes[row] + seen[row, column].sum(1) - 1,
        row=row,
        place=prefixes[row] + column,
        prefixes=prefixes,
        offsets=offsets,
        max_nodes=max(sizes),
        behind=0,
        width=max(contexts) + max(sizes),
        seen=seen[row, column],
        exact=True,
    )


def draft_level(
    drafter: Drafter, context: int, width: int, device: torch.device
) -> Callable[[], None]:
    """One level of `width` nodes below the root."""
    parent = torch.tensor([[-1] * width], device=device)
    slots = torch.zeros_like(parent)

    def level() -> None:
        drafter.root_logits(1)
        drafter.level(trees_pass([context], [width], parent), slots)

    return level


def medians(jobs: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Microseconds of every job, interleaved so that drift hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(repeats + 3):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 3:  # warm-up
                times[name].append(1e6 * (time.perf_counter() - start))
    return times


def prepare(pair: Pair, context: int) -> dict[str, Callable[[], None]]:
    model, drafter = pair.target.model, pair.drafter
    assert drafter is not None
    model.capture(drafter.aux_layers)
    model.allocate(1, context + max(TARGET_SIZES))
    drafter.allocate(1, context + 4 * max(WIDTHS), max(WIDTHS))
    prompt = torch.arange(1, context + 1, device=model.device)[None] % 1000
    states = model.extend(0, 0, prompt).features
    drafter.prefill(0, torch.cat([prompt, prompt[:, :1]], 1), states)
    jobs = {f"target({n})": target_forward(model, context, n) for n in TARGET_SIZES}
    return jobs | {f"draft({w})": draft_level(drafter, context, w, model.device) for w in WIDTHS}


@torch.inference_mode()
def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__ or "")
    options.add_argument("--context", type=int, default=128, help="tokens before the root")
    options.add_argument("--repeats", type=int, default=60, help="timed repeats")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    pair = load_pair("embedded", "embedded", device=chosen.device, dtype=chosen.dtype)
    rows = [
        {
            "system": name,
            "median_us": statistics.median(values),
            "p10_us": sorted(values)[len(values) // 10],
            "p90_us": sorted(values)[-len(values) // 10],
        }
        for name, values in medians(prepare(pair, chosen.context), chosen.repeats).items()
    ]
    note = (
        f"embedded pair, {chosen.dtype}, {chosen.device}, {chosen.threads} threads, context "
        f"{chosen.context}, {chosen.repeats} repeats; target(n): n nodes, draft(w): head on w nodes"
    )
    report("forward", rows, chosen, note)


if __name__ == "__main__":
    main()
