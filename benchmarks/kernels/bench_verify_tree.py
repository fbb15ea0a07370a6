"""`walk_tree` under each acceptance, beside the same laws in torch operations.

python benchmarks/kernels/bench_verify_tree.py            # on a GPU, half a minute
python benchmarks/kernels/bench_verify_tree.py --small    # to its end on any machine

There is next to nothing to read, so the floor is a launch, not the memory.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from timing import Row, copy_bandwidth, launch_floor, main, row, time_us, versus
from torch import Tensor

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.verify_tree import Acceptance, RunnerUp, reference, walk_tree

SHAPES = [(b, *n) for n in ((9, 8), (60, 11), (256, 20), (1024, 32)) for b in (1, 8, 32)]
SMALL_SHAPES = [(1, 9, 8), (4, 60, 11)]
VOCAB = 128_256


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Batches of trees of up to 1,024 nodes."""
    bandwidth = copy_bandwidth(device, small=small)
    labels = {"op": "walk_tree", "system": "launch floor", "acceptance": "", "batch": 1}
    found = [row(launch_floor(device), 8, bandwidth, **labels, nodes=1, depth=0)]
    for batch_size, num_nodes, max_depth in SMALL_SHAPES if small else SHAPES:
        tree = _trees(batch_size, num_nodes, max_depth, device)
        for name, acceptance in _acceptances(tree[0]).items():
            found += _of_shape(tree, max_depth, name, acceptance, bandwidth)
    return found


def _of_shape(
    tree: list[Tensor], max_depth: int, name: str, given: Acceptance | None, bandwidth: float
) -> list[Row]:
    device, (batch_size, num_nodes) = tree[0].device, tree[0].shape
    shape = {"acceptance": name, "batch": batch_size, "nodes": num_nodes, "depth": max_depth}
    parts = [*tree]
    if given is not None:
        own = (part for part in vars(given).values() if isinstance(part, Tensor))
        parts += [part for part in own if part.dtype != torch.bool]
    num_bytes = sum(part.numel() * part.element_size() for part in parts)
    backend = "fused" if runs_fused("walk_tree", tree[0]) else "reference"
    runs = {
        f"specctl {backend}": lambda: walk_tree(*tree, max_depth, given),
        "torch composition": lambda: reference.walk_tree(*tree, max_depth, given),
    }
    found = [
        row(time_us(run, device), num_bytes, bandwidth, op="walk_tree", system=system, **shape)
        for system, run in runs.items()
    ]
    return versus(found, found[0])


def _trees(batch_size: int, num_nodes: int, max_depth: int, device: torch.device) -> list[Tensor]:
    """Parents, tokens and answers; the first child matches, down to half the depth.

    Level by level, as many nodes in each; a level's parents are the first half of the one above.
    """
    width = -(-(num_nodes - 1) // max_depth)
    parent = [-1]
    for node in range(1, num_nodes):
        level, place = divmod(node - 1, width)
        parent.append(0 if level == 0 else 1 + (level - 1) * width + place // 2)
    tokens = torch.arange(num_nodes)
    targets = torch.full((num_nodes,), VOCAB - 1)
    path = [0, *(1 + level * width for level in range(max_depth // 2))]
    for above, node in pairwise(path):
        targets[above] = node
    columns = (torch.tensor(parent), tokens, targets)
    return [column.repeat(batch_size, 1).to(device) for column in columns]


def _acceptances(parent: Tensor) -> dict[str, Acceptance | None]:
    (batch_size, num_nodes), device = parent.shape, parent.device
    ids = torch.randint(VOCAB, (batch_size, num_nodes, 2), device=device)
    logits = torch.randn(batch_size, num_nodes, 2, device=device).sort(-1, descending=True).values
    denied = torch.zeros(VOCAB, dtype=torch.bool, device=device)
    greedy = torch.ones(batch_size, dtype=torch.bool, device=device)
    bound = torch.full((batch_size,), 0.9, device=device)
    return {
        "strict": None,
        "runner up": RunnerUp(ids, logits, greedy, bound, "ratio", denied),
    }


if __name__ == "__main__":
    main("verify_tree", rows, "Microseconds of walk_tree.")
