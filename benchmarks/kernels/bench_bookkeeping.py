"""A round's small integers, beside the same by torch operations.

python benchmarks/kernels/bench_bookkeeping.py            # on a GPU, half a minute
python benchmarks/kernels/bench_bookkeeping.py --small    # to its end on any machine

There is next to nothing to read, so the floor is a launch, not the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from bench_tree_build import Size, cut, grown
from timing import Row, copy_bandwidth, launch_floor, main, row, time_us, versus
from torch import Tensor

from specctl.kernels.bookkeeping import (
    Opened,
    Walked,
    lay_out,
    new_opened,
    new_settled,
    open_level,
    open_tree,
    reference,
    settle,
)
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.tree_build import BuiltTree
from specctl.tree import DraftPool

BATCHES, SMALL_BATCHES = (1, 8, 32), (1, 2)
Runs = tuple[Callable[[], object], Callable[[], object], Iterable[Tensor]]
"""Ours, torch's, and what is read or written once."""


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Each op once, in the sizes of EAGLE-2's trees: 8 levels of 10 nodes, 60 verified."""
    bandwidth = copy_bandwidth(device, small=small)
    labels = {"op": "launch floor", "system": "launch floor", "batch": 1}
    found = [row(launch_floor(device), 8, bandwidth, **labels)]
    for batch in SMALL_BATCHES if small else BATCHES:
        for op, runs in _runs(Size(batch, 4 if small else 8, 10, 10, 60), device).items():
            found += _pair(op, batch, runs, bandwidth, device)
    return found


def _pair(op: str, batch: int, runs: Runs, bandwidth: float, device: torch.device) -> list[Row]:
    ours, torchs, tensors = runs
    backend = "fused" if runs_fused(op, torch.empty(0, device=device)) else "reference"
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    found = [
        row(time_us(run, device), num_bytes, bandwidth, op=op, system=system, batch=batch)
        for system, run in ((f"specctl {backend}", ours), ("torch composition", torchs))
    ]
    return versus(found, found[0])


def _runs(size: Size, device: torch.device) -> dict[str, Runs]:
    pool, frontier, _ = grown(size, device)
    counts = torch.full((size.batch,), 1000, device=device)
    vacant = torch.zeros(size.batch, dtype=torch.bool, device=device)
    tree = cut(pool, size, counts)
    return {
        "open_level": _level(size, pool, frontier, counts, vacant),
        "lay_out": _axis(size, tree, counts),
        "settle": _settling(size, pool, tree, counts, vacant),
        "open_tree": _roots(size, pool, counts, vacant),  # the last: it empties the pool
    }


def _opened(size: Size, device: torch.device) -> Opened:
    words = -(-size.levels * size.width // 32)
    return new_opened(size.batch, size.width, words, device)


def _roots(size: Size, pool: DraftPool, counts: Tensor, vacant: Tensor) -> Runs:
    given = (pool, counts, vacant, _opened(size, counts.device))
    written = (pool.parent, pool.joint_logp)
    return lambda: open_tree(*given), lambda: reference.open_tree(*given), written


def _level(size: Size, pool: DraftPool, frontier: Tensor, counts: Tensor, vacant: Tensor) -> Runs:
    """The nodes above the deepest level, in two words or more."""
    opened, above = (_opened(size, counts.device) for _ in range(2))
    keep = torch.ones_like(frontier, dtype=torch.bool)
    sizes = {
        "start": size.level_start - size.width * size.top_k,
        "top_k": size.top_k,
        "depth": size.levels - 1,
        "behind": size.width * (size.levels - 2),
    }
    given = (pool, frontier, keep, vacant, counts, above.words, opened)
    return (
        lambda: open_level(*given, **sizes),
        lambda: reference.open_level(*given, **sizes),
        (*opened, above.words, frontier, keep, frontier),
    )


def _axis(size: Size, tree: BuiltTree, counts: Tensor) -> Runs:
    places = {"num_tokens": size.batch * size.tokens, "last_place": 4095}
    laid = lay_out(tree, counts, counts, **places)
    read = (tree.token_ids, tree.position_ids, tree.depth, tree.ancestor_bits)
    return (
        lambda: lay_out(tree, counts, counts, **places),
        lambda: reference.lay_out(tree, counts, counts, **places),
        (*laid, *read),
    )


def _settling(size: Size, pool: DraftPool, tree: BuiltTree, counts: Tensor, vacant: Tensor) -> Runs:
    """Paths of three nodes and the bonus."""
    steps, total = size.levels + 1, size.batch * size.tokens
    laid = lay_out(tree, counts, counts, num_tokens=total, last_place=4095)
    path = torch.arange(steps, device=counts.device).repeat(size.batch, 1)
    path = path.masked_fill(path >= 3, -1)
    found = Walked(
        path=path,
        token_ids=path,
        num_nodes=tree.num_nodes,
        node_at=laid.node_at,
        best=torch.randn(total, device=counts.device),
        parent=pool.parent,
        depth=pool.depth,
        submitted=tree.submitted,
        faulty=vacant,
        stable=counts,
    )
    settled = new_settled(size.batch, steps, counts.device)
    return (
        lambda: settle(found, settled),
        lambda: reference.settle(found, settled),
        (*found, *settled),
    )


if __name__ == "__main__":
    main("bookkeeping", rows, "Microseconds of open_tree, open_level, lay_out and settle.")
