"""`race`: the target's tokens, drawn or likeliest, beside torch operations.

python benchmarks/kernels/bench_race.py            # on a GPU, half a minute
python benchmarks/kernels/bench_race.py --small    # to its end on any machine
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import Row, copy_bandwidth, main, row, time_us, versus
from torch import Tensor

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.race import race, reference

SHAPES = [(r, v) for v in (32_000, 128_256, 151_936) for r in (8, 60, 240)]
SMALL_SHAPES = [(2, 1_000), (4, 4_096)]


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Every shape drawn and greedy, of float32 logits, as the processors leave them."""
    bandwidth = copy_bandwidth(device, small=small)
    found = []
    for num_rows, vocab_size in SMALL_SHAPES if small else SHAPES:
        law = 4 * torch.randn(num_rows, vocab_size, device=device)
        keys = torch.randint(-(2**62), 2**62, (num_rows,), device=device)
        for is_greedy in (False, True):
            found += _of_shape(law, keys, torch.full_like(keys > 0, is_greedy), bandwidth)
    return found


def _of_shape(law: Tensor, keys: Tensor, greedy: Tensor, bandwidth: float) -> list[Row]:
    is_greedy = bool(greedy[0])
    backend = "fused" if runs_fused("race", law) else "reference"
    runs: dict[str, Callable[[], object]] = {f"specctl {backend}": lambda: race(law, keys, greedy)}
    if is_greedy:
        runs["torch argmax"] = lambda: law.argmax(-1)
    else:
        runs["torch, same noise"] = lambda: reference.race(law, keys, greedy)
        # Another law of the same accuracy, whose noise nobody can name again.
        runs["torch, any noise"] = lambda: (
            law.softmax(-1) / torch.empty_like(law).exponential_()
        ).argmax(-1)
    shape = {"rows": law.shape[0], "vocab": law.shape[1], "greedy": is_greedy}
    num_bytes = law.numel() * law.element_size()
    found = [
        row(time_us(run, law.device), num_bytes, bandwidth, op="race", system=system, **shape)
        for system, run in runs.items()
    ]
    return versus(found, found[0])


if __name__ == "__main__":
    main("race", rows, "Microseconds of race.")
