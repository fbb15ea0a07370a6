"""`commit_kv` of an 8B model's cache, beside torch's indexing.

python benchmarks/kernels/bench_commit_kv.py            # on a GPU, half a minute
python benchmarks/kernels/bench_commit_kv.py --small    # to its end on any machine
"""

from __future__ import annotations

import torch
from timing import Row, copy_bandwidth, main, row, time_us, versus
from torch import Tensor

from specctl.kernels.commit_kv import commit_kv, reference
from specctl.kernels.dispatch import runs_fused

NUM_PLANES, NUM_HEADS, DIM, TREE, STEPS = 64, 8, 128, 60, 12
"""32 layers' keys and values, 8 heads of 128 numbers; trees of 60 nodes and 11 levels."""
BATCHES, SMALL_BATCHES = (1, 8, 32), (1, 2)
ACCEPTED = (0, 3, 11)
"""Draft tokens of a round: none moves nothing, three is typical, eleven is all that there is."""


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Behind contexts of 2,000 tokens (40 where `small`), in bfloat16."""
    bandwidth, found, context = copy_bandwidth(device, small=small), [], 40 if small else 2000
    for batch_size in SMALL_BATCHES if small else BATCHES:
        shape = (NUM_PLANES, batch_size, NUM_HEADS, context + TREE, DIM)
        storage = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        for accepted in ACCEPTED:
            found += _of_shape(storage, context, accepted, bandwidth)
    return found


def _of_shape(storage: Tensor, context: int, accepted: int, bandwidth: float) -> list[Row]:
    device, batch_size = storage.device, storage.shape[1]
    offset = torch.full((batch_size,), context, device=device)
    path = _paths(batch_size, accepted).to(device)
    entry_bytes = NUM_PLANES * NUM_HEADS * DIM * storage.element_size()
    num_bytes = 2 * batch_size * accepted * entry_bytes + 8 * (path.numel() + batch_size)
    shape = {"batch": batch_size, "accepted": accepted, "dtype": "bfloat16"}
    backend = "fused" if runs_fused("commit_kv", storage) else "reference"
    runs = {
        f"specctl {backend}": lambda: commit_kv(storage, offset, path),
        "torch composition": lambda: reference.commit_kv(storage, offset, path),
    }
    found = [
        row(time_us(run, device), num_bytes, bandwidth, op="commit_kv", system=system, **shape)
        for system, run in runs.items()
    ]
    return versus(found, found[0])


def _paths(batch_size: int, accepted: int) -> Tensor:
    """Every accepted entry moves: nodes stand behind the slots that they go to."""
    path = torch.full((batch_size, STEPS), -1)
    path[:, : accepted + 1] = torch.arange(accepted + 1) * (TREE // STEPS)
    return path


if __name__ == "__main__":
    main("commit_kv", rows, "Microseconds of commit_kv.")
