"""Ways to cut `tree_attention` at 60 nodes and a context of 4,096: the figures of `NARROW`.

python benchmarks/kernels/sweep_tree_attention.py            # on a GPU, two minutes to compile
TRITON_INTERPRET=1 python benchmarks/kernels/sweep_tree_attention.py --small    # elsewhere
"""

from __future__ import annotations

from itertools import product

import torch
from bench_tree_attention import DIM, Given
from timing import Row, copy_bandwidth, main, row, time_us

from specctl.kernels.tree_attention import fused

BLOCKS = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 64, 4, 3), (128, 32, 8, 4)]
BLOCKS += [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 128, 8, 2)]
SPLITS = (4, 6, 8, 12, 16)


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Queries, entries, warps and stages of a program; splits of the keys."""
    bandwidth = copy_bandwidth(device, small=small)
    given = Given(1, 60, 4096, device) if not small else Given(1, 2, 40, device)
    blocks, splits = (BLOCKS[:1], SPLITS[:1]) if small else (BLOCKS, SPLITS)
    return [_row(given, block, count, bandwidth) for block, count in product(blocks, splits)]


def _row(given: Given, block: tuple[int, int, int, int], splits: int, bandwidth: float) -> Row:
    def run() -> torch.Tensor:
        return fused.tree_attention(
            given.query.flatten(0, 1),
            given.keys,
            given.values,
            given.prefixes,
            given.offsets,
            given.words,
            scaling=DIM**-0.5,
            max_nodes=given.num_nodes,
            behind=0,
            tiles=fused.Tiles(1 << 31, *block),
            num_slots=splits,
        )

    queries, entries, warps, stages = block
    labels = {"queries": queries, "entries": entries, "warps": warps, "stages": stages}
    return row(time_us(run, given.device), given.num_bytes, bandwidth, **labels, splits=splits)


if __name__ == "__main__":
    main("sweep_tree_attention", rows, "Microseconds of tree attention, cut differently.")
