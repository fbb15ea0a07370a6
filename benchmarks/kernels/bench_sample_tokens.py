"""`sample_tokens`: the target's tokens, drawn or likeliest, beside torch operations.

python benchmarks/kernels/bench_sample_tokens.py            # on a GPU, half a minute
python benchmarks/kernels/bench_sample_tokens.py --small    # to its end on any machine
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import Row, copy_bandwidth, main, row, time_us, versus
from torch import Tensor

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.sample_tokens import reference, sample_tokens

SHAPES = [(r, v) for v in (32_000, 128_256, 151_936) for r in (8, 60, 240)]
SMALL_SHAPES = [(2, 1_000), (4, 4_096)]


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Every shape drawn and greedy, of float32 logits, as the processors leave them."""
    bandwidth = copy_bandwidth(device, small=small)
    found = []
    for num_rows, vocab_size in SMALL_SHAPES if small else SHAPES:
        logits = 4 * torch.randn(num_rows, vocab_size, device=device)
        keys = torch.randint(-(2**62), 2**62, (num_rows,), device=device)
        for is_greedy in (False, True):
            found += _of_shape(logits, keys, torch.full_like(keys > 0, is_greedy), bandwidth)
    return found


def _of_shape(logits: Tensor, keys: Tensor, greedy: Tensor, bandwidth: float) -> list[Row]:
    is_greedy = bool(greedy[0])
    backend = "fused" if runs_fused("sample_tokens", logits) else "reference"
    runs: dict[str, Callable[[], object]] = {
        f"specctl {backend}": lambda: sample_tokens(logits, keys, greedy)
    }
    if is_greedy:
        runs["torch argmax"] = lambda: logits.argmax(-1)
    else:
        runs["torch, same noise"] = lambda: reference.sample_tokens(logits, keys, greedy)
        # As accurate, but its noise cannot be drawn again.
        runs["torch, any noise"] = lambda: (
            logits.softmax(-1) / torch.empty_like(logits).exponential_()
        ).argmax(-1)
    shape = {"rows": logits.shape[0], "vocab": logits.shape[1], "greedy": is_greedy}
    num_bytes = logits.numel() * logits.element_size()
    found = [
        row(
            time_us(run, logits.device),
            num_bytes,
            bandwidth,
            op="sample_tokens",
            system=system,
            **shape,
        )
        for system, run in runs.items()
    ]
    return versus(found, found[0])


if __name__ == "__main__":
    main("sample_tokens", rows, "Microseconds of sample_tokens.")
