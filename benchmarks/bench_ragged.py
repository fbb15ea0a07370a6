"""Verification of unequal trees, back to back, beside equal ones padded to the largest.

One forward of the target over random trees behind random texts, both ways in turn on the same
requests, medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from bench_forward import medians, trees_pass
from common import parser, report
from torch import Tensor

from specctl.runtime.cached_model import CachedModel
from specctl.runtime.load import load_pair
from specctl.tree import PAD

BATCH_SIZES = (4, 16, 32)
LARGEST = 48


def spread(name: str, batch_size: int, generator: torch.Generator) -> list[int]:
    """Sizes of the trees of a batch."""
    draw = {
        "equal 4": lambda: torch.full((batch_size,), 4),
        "equal 24": lambda: torch.full((batch_size,), 24),
        "3 or 4": lambda: torch.randint(3, 5, (batch_size,), generator=generator),
        "20 to 24": lambda: torch.randint(20, 25, (batch_size,), generator=generator),
        "1 to 8": lambda: torch.randint(1, 9, (batch_size,), generator=generator),
        "1 to 48": lambda: torch.randint(1, LARGEST + 1, (batch_size,), generator=generator),
        "one 48, others 4": lambda: torch.tensor([LARGEST] + [4] * (batch_size - 1)),
        "one 4, others 48": lambda: torch.tensor([4] + [LARGEST] * (batch_size - 1)),
    }
    sizes: list[int] = draw[name]().tolist()
    return sizes


SPREADS = (
    "equal 4",
    "equal 24",
    "3 or 4",
    "20 to 24",
    "1 to 8",
    "1 to 48",
    "one 48, others 4",
    "one 4, others 48",
)
CONTEXTS = {"alike": (150, 150), "unlike": (20, 280)}


def random_parents(sizes: list[int]) -> Tensor:
    """`[B, N]`; a node's parent is any node before it."""
    generator = torch.Generator().manual_seed(1)
    parent = torch.full((len(sizes), max(sizes)), PAD)
    for row, size in enumerate(sizes):
        parent[row, 0] = -1
        for node in range(1, size):
            above = torch.randint(max(0, node - 6), node, (), generator=generator)
            parent[row, node] = above
    return parent


def jobs(model: CachedModel, batch_size: int, context: str) -> dict[str, Callable[[], None]]:
    generator = torch.Generator().manual_seed(2)
    low, high = CONTEXTS[context]
    offsets = torch.linspace(low, high, batch_size).long()
    offsets = offsets[torch.randperm(batch_size, generator=generator)].tolist()
    found = {}
    for name in SPREADS:
        sizes = spread(name, batch_size, generator)
        label = f"{name}|{sum(sizes)}|{batch_size * max(sizes)}"
        for packed in (False, True):
            each = sizes if packed else [max(sizes)] * batch_size
            reads = trees_pass(offsets, each, random_parents(each))
            found[f"{label}|{packed}"] = partial(model.forward, reads)
    return found


def rows_of(
    times: dict[str, list[float]], batch_size: int, context: str
) -> list[dict[str, object]]:
    rows = []
    for key, padded in times.items():
        label, _, packed = key.rpartition("|")
        if packed == "True":
            continue
        name, num_packed, num_padded = label.split("|")
        both = statistics.median(padded) / 1e3, statistics.median(times[f"{label}|True"]) / 1e3
        rows.append(
            {
                "sizes": name,
                "batch": batch_size,
                "contexts": context,
                "packed_tokens": int(num_packed),
                "padded_tokens": int(num_padded),
                "padded_ms": both[0],
                "packed_ms": both[1],
                "packed/padded": both[1] / both[0],
            }
        )
    return rows


@torch.inference_mode()
def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__ or "")
    options.add_argument("--repeats", type=int, default=15, help="timed repeats")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    pair = load_pair("embedded", "embedded", device=chosen.device, dtype=chosen.dtype)
    model, rows = pair.target.model, []
    for batch_size in BATCH_SIZES:
        model.allocate(batch_size, 280 + LARGEST)
        for context in CONTEXTS:
            times = medians(jobs(model, batch_size, context), chosen.repeats)
            rows += rows_of(times, batch_size, context)
    note = (
        f"embedded target, {chosen.dtype}, {chosen.device}, {chosen.threads} threads; contexts "
        f"alike: 150, unlike: 20 to 280; {chosen.repeats} repeats in turn"
    )
    report("ragged", rows, chosen, note)


if __name__ == "__main__":
    main()
