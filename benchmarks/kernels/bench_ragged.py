"""`pack_ragged` and `unpack_ragged` of trees' hidden states and tokens, beside torch's indexing.

python benchmarks/kernels/bench_ragged.py            # on a GPU, half a minute
python benchmarks/kernels/bench_ragged.py --small    # to its end on any machine
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from timing import Row, copy_bandwidth, main, row, time_us, versus
from torch import Tensor

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.ragged import pack_ragged, reference, unpack_ragged

LARGEST = 60
SHAPES = [(b, w) for w in ((4096, torch.bfloat16), (1, torch.int64)) for b in (8, 32, 120)]
SMALL_SHAPES = [(4, (64, torch.bfloat16)), (4, (1, torch.int64))]


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Trees of 1 to 60 nodes, 30 on average."""
    bandwidth, found = copy_bandwidth(device, small=small), []
    for batch_size, (width, dtype) in SMALL_SHAPES if small else SHAPES:
        values = torch.ones(batch_size, LARGEST, width, dtype=dtype, device=device)
        draw = torch.Generator().manual_seed(batch_size)
        sizes = torch.randint(1, LARGEST + 1, (batch_size,), generator=draw).tolist()
        found += _of_shape(values, sizes, bandwidth)
    return found


def _of_shape(values: Tensor, sizes: list[int], bandwidth: float) -> list[Row]:
    device, total = values.device, sum(sizes)
    offsets = torch.tensor([0, *accumulate(sizes)], device=device)
    packed = pack_ragged(values, offsets, total)
    both = packed.numel() * packed.element_size()
    runs = {
        "pack_ragged": (
            2 * both,
            lambda: pack_ragged(values, offsets, total),
            lambda: reference.pack_ragged(values, offsets, total),
        ),
        "unpack_ragged": (
            both + values.numel() * values.element_size(),
            lambda: unpack_ragged(packed, offsets, LARGEST),
            lambda: reference.unpack_ragged(packed, offsets, LARGEST),
        ),
    }
    shape = {"batch": len(sizes), "tokens": total, "width": values.shape[2]}
    return [
        found
        for op, (num_bytes, ours, torchs) in runs.items()
        for found in _beside(op, ours, torchs, num_bytes, bandwidth, values, shape)
    ]


def _beside(
    op: str,
    ours: Callable[[], Tensor],
    torchs: Callable[[], Tensor],
    num_bytes: int,
    bandwidth: float,
    values: Tensor,
    shape: dict[str, int],
) -> list[Row]:
    shape |= {"dtype": str(values.dtype).removeprefix("torch.")}  # type: ignore[dict-item]
    backend = "fused" if runs_fused(op, values) else "reference"
    systems = {f"specctl {backend}": ours, "torch composition": torchs}
    found = [
        row(time_us(run, values.device), num_bytes, bandwidth, op=op, system=system, **shape)
        for system, run in systems.items()
    ]
    return versus(found, found[0])


if __name__ == "__main__":
    main("pack_ragged", rows, "Microseconds of pack_ragged and unpack_ragged.")
