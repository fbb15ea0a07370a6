"""`js_distance` beside what a user would write in torch.

python benchmarks/kernels/bench_js_distance.py            # on a GPU, half a minute
python benchmarks/kernels/bench_js_distance.py --small    # to its end on any machine
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from timing import Row, copy_bandwidth, main, row, time_us, versus
from torch import Tensor

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.js_distance import js_distance

SHAPES = [(r, *v) for v in ((32_000, 128_256), (151_936, 151_936)) for r in (8, 60, 240)]
SMALL_SHAPES = [(2, 500, 1_000), (4, 4_096, 4_096)]


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Every shape in bfloat16; the bytes are those of reading both models' logits once."""
    bandwidth = copy_bandwidth(device, small=small)
    shapes = SMALL_SHAPES if small else SHAPES
    return [found for shape in shapes for found in _of_shape(*shape, device, bandwidth)]


def composition(draft: Tensor, target: Tensor, ids: Tensor) -> Tensor:
    """The definition, with the drafter's law spread over the target's vocabulary."""
    p = target.float().softmax(-1)
    q = torch.zeros_like(p).index_copy_(1, ids, draft.float().softmax(-1))
    middle = (p + q) / 2
    nats = (torch.special.xlogy(p, p / middle) + torch.special.xlogy(q, q / middle)).nansum(-1)
    return (nats / (2 * math.log(2))).clamp(0, 1).sqrt()


def _of_shape(
    num_rows: int, draft_size: int, vocab_size: int, device: torch.device, bandwidth: float
) -> list[Row]:
    draw = torch.Generator(device).manual_seed(0)
    target = 4 * torch.randn(num_rows, vocab_size, generator=draw, device=device)
    ids = torch.randperm(vocab_size, generator=draw, device=device)[:draft_size].sort().values
    draft = (target[:, ids] + torch.randn(num_rows, draft_size, device=device)).bfloat16()
    target = target.bfloat16()
    num_bytes = 2 * (draft.numel() + target.numel())
    shape = {"rows": num_rows, "draft_vocab": draft_size, "vocab": vocab_size, "dtype": "bfloat16"}

    def timed(system: str, run: Callable[[], object]) -> Row:
        labels = {"op": "js_distance", "system": system, **shape}
        return row(time_us(run, device), num_bytes, bandwidth, **labels)

    backend = "fused" if runs_fused("js_distance", draft) else "reference"
    first = timed(f"specctl {backend}", lambda: js_distance(draft, target, ids))
    return versus(
        [first, timed("torch composition", lambda: composition(draft, target, ids))], first
    )


if __name__ == "__main__":
    main("js_distance", rows, "Microseconds of js_distance.")
