"""`append_level`, `select_nodes` and `link_tree`, beside the same in torch operations.

python benchmarks/kernels/bench_tree_build.py            # on a GPU, half a minute
python benchmarks/kernels/bench_tree_build.py --small    # to its end on any machine

There is next to nothing to read, so the floor is a launch, not the memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from timing import Row, Timing, copy_bandwidth, launch_floor, main, row, time_us, versus
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.tree_build import BuiltTree, append_level, link_tree, select_nodes
from specctl.policy.growing import Growth
from specctl.policy.rules import Frontier, Level, best_nodes, best_of_level
from specctl.tree import Children, DraftPool, take
from tests.trees import ancestor_mask, pack_bits


class Size(NamedTuple):
    """A drafting: requests, levels, nodes expanded a level, children each, nodes submitted."""

    batch: int
    levels: int
    width: int
    top_k: int
    tokens: int

    @property
    def level_start(self) -> int:
        """First slot of the deepest level."""
        return 1 + self.top_k + (self.levels - 2) * self.width * self.top_k

    @property
    def capacity(self) -> int:
        return self.level_start + self.width * self.top_k


SIZES = [
    Size(batch, *shape)
    for shape in ((6, 10, 10, 60), (8, 3, 10, 48), (11, 10, 10, 60), (8, 8, 8, 256))
    for batch in (1, 32)
]
SMALL_SIZES = [Size(1, 6, 10, 10, 60), Size(4, 4, 3, 5, 16)]


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """The deepest level of a draft, and the tree cut from it."""
    bandwidth = copy_bandwidth(device, small=small)
    floor = launch_floor(device)
    labels = {"op": "append_level", "system": "launch floor", **Size(1, 0, 0, 0, 1)._asdict()}
    found = [row(floor, 8, bandwidth, **labels)]
    for size in SMALL_SIZES if small else SIZES:
        found += _append_rows(size, device, bandwidth) + _cut_rows(size, device, bandwidth)
    return found


def _append_rows(size: Size, device: torch.device, bandwidth: float) -> list[Row]:
    pool, frontier, children = grown(size, device)
    start, depth = size.level_start, size.levels
    growth = Growth(pool.token_ids[:, 0].clone(), size.capacity)
    keep = torch.ones_like(frontier, dtype=torch.bool)

    def ours() -> object:
        options = {"start": start, "depth": depth, "num_best": size.width}
        return append_level(pool, frontier, keep, children, **options)

    def before() -> object:
        growth.level = Level(depth - 1, pool.first(start), 0)
        return best_of_level(growth.append(Frontier(frontier, keep), children), size.width)

    num_bytes = size.batch * size.width * size.top_k * (3 * 8 + 5 * 4 + 1 + 8 + 4)
    return _pair("append_level", size, ours, before, num_bytes, bandwidth, device)


def _cut_rows(size: Size, device: torch.device, bandwidth: float) -> list[Row]:
    pool, _, _ = grown(size, device)
    positions = torch.zeros(size.batch, dtype=torch.int64, device=device)

    def ours() -> object:
        return cut(pool, size, positions)

    def before() -> tuple[Tensor, ...]:
        return _in_torch(pool, size, positions)

    words = -(-size.tokens // 32)
    num_bytes = size.batch * (size.capacity * 4 + size.tokens * (8 * 8 + 4 * words + 28))
    return _pair("select and link", size, ours, before, num_bytes, bandwidth, device)


def cut(pool: DraftPool, size: Size, positions: Tensor) -> BuiltTree:
    """The best nodes of a pool as a tree."""
    submitted = select_nodes(pool.joint_logp, size.tokens)
    return link_tree(pool, submitted, size.levels, positions)


def _in_torch(draft: DraftPool, size: Size, positions: Tensor) -> tuple[Tensor, ...]:
    """The same tree by the operations of rules and tree."""
    tree = take(draft, best_nodes(draft, size.tokens))
    bits = pack_bits(ancestor_mask(tree.parent, size.levels))
    return bits, positions[:, None] + tree.depth, tree.num_nodes


def _pair(
    op: str,
    size: Size,
    ours: object,
    before: object,
    num_bytes: int,
    bandwidth: float,
    device: torch.device,
) -> list[Row]:
    backend = "fused" if runs_fused(op, torch.empty(0, device=device)) else "reference"
    found = []
    for system, run in ((f"specctl {backend}", ours), ("torch composition", before)):
        timing: Timing = time_us(run, device)  # type: ignore[arg-type]
        found.append(row(timing, num_bytes, bandwidth, op=op, system=system, **size._asdict()))
    return versus(found, found[0])


def grown(size: Size, device: torch.device) -> tuple[DraftPool, Tensor, Children]:
    """A pool up to its deepest level, the frontier above that, and the children below."""
    pool = _empty(size, device)
    frontier = torch.zeros(size.batch, 1, dtype=torch.int64, device=device)
    start = 1
    for depth in range(1, size.levels + 1):
        children = _children(size, frontier.shape[1], device)
        keep = torch.ones_like(frontier, dtype=torch.bool)
        options = {"start": start, "depth": depth, "num_best": size.width}
        above, best = frontier, append_level(pool, frontier, keep, children, **options)
        frontier, start = best.index, start + frontier.shape[1] * size.top_k
    return pool, above, children


def _empty(size: Size, device: torch.device) -> DraftPool:
    shape = (size.batch, size.capacity)
    integers = list(torch.zeros(4, *shape, dtype=torch.int64, device=device))
    floats = list(torch.zeros(5, *shape, device=device))
    integers[1][:, 0] = -1
    expanded = torch.zeros(shape, dtype=torch.bool, device=device)
    return DraftPool(*integers[:3], *floats[:4], integers[3], expanded, floats[4])


def _children(size: Size, width: int, device: torch.device) -> Children:
    shape = (size.batch, width, size.top_k)
    logp = torch.randn(shape, device=device).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.randint(128_256, shape, device=device)
    return Children(ids, logp, *(torch.rand(shape[:2], device=device) for _ in range(2)))


if __name__ == "__main__":
    main("tree_build", rows, "Microseconds of append_level, and of select_nodes with link_tree.")
