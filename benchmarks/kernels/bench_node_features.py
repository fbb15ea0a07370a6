"""`node_features` beside what a user would write in torch, and FlashInfer's top-k alone.

python benchmarks/kernels/bench_node_features.py            # on a GPU, about a minute
python benchmarks/kernels/bench_node_features.py --small    # to its end on any machine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from timing import Row, copy_bandwidth, launch_floor, main, optional, row, time_us, versus
from torch import Tensor

from specctl.kernels.dispatch import runs_fused
from specctl.kernels.node_features import node_features

SHAPES = [(r, v) for v in (32_000, 128_256, 151_936) for r in (8, 60, 240, 600)]
SMALL_SHAPES = [(2, 1_000), (4, 4_096)]
TOP_K, ENTROPY_TOP_K = 8, 10


def rows(device: torch.device, *, small: bool = False) -> list[Row]:
    """Every shape in bfloat16, float32 at 60 rows, and the start of a graph by itself."""
    bandwidth = copy_bandwidth(device, small=small)
    labels = {"op": "node_features", "system": "launch floor", "rows": 1, "vocab": 1}
    found = [row(launch_floor(device), 8, bandwidth, **labels, dtype="float32")]
    for num_rows, vocab_size in SMALL_SHAPES if small else SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            if dtype == torch.bfloat16 or num_rows == 60 or small:
                logits = 4 * torch.randn(num_rows, vocab_size, device=device)
                found += _of_shape(logits.to(dtype), bandwidth)
    return found


def composition(logits: Tensor) -> tuple[Tensor, ...]:
    """The same numbers from torch's own operations."""
    x = logits.float()
    log_sum_exp = x.logsumexp(-1)
    best = x.topk(ENTROPY_TOP_K, -1)
    top_logp = best.values[:, :TOP_K] - log_sum_exp[:, None]
    entropy = log_sum_exp - (x.softmax(-1) * x).sum(-1)
    q = best.values.log_softmax(-1)
    return best.indices, top_logp, entropy, -(q.exp() * q).sum(-1), log_sum_exp, best.values[:, :2]


def _of_shape(logits: Tensor, bandwidth: float) -> list[Row]:
    device, num_bytes = logits.device, logits.numel() * logits.element_size()
    shape = {"rows": logits.shape[0], "vocab": logits.shape[1]}
    shape |= {"dtype": str(logits.dtype).removeprefix("torch.")}

    def timed(system: str, run: Callable[[], object], *, cold: bool = True) -> Row:
        labels = {"op": "node_features", "system": system, **shape}
        return row(time_us(run, device, cold=cold), num_bytes, bandwidth, **labels)

    def ours() -> object:
        return node_features(logits, TOP_K, ENTROPY_TOP_K)

    backend = "fused" if runs_fused("node_features", logits) else "reference"
    first = timed(f"specctl {backend}", ours)
    others = [timed(f"specctl {backend}, in L2", ours, cold=False)]
    others += [timed("torch composition", lambda: composition(logits))]
    others += [timed("torch topk alone", lambda: logits.topk(ENTROPY_TOP_K, -1))]
    others += [timed(name, run) for name, run in _flashinfer(logits)]
    return versus([first, *others], first)


def _flashinfer(logits: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Its top-k, which gives no entropies; none in older versions, and none without CUDA."""
    library = optional("flashinfer") if logits.is_cuda else None
    if library is not None and hasattr(library, "top_k"):
        yield "flashinfer top_k alone", lambda: library.top_k(logits, ENTROPY_TOP_K, sorted=True)


if __name__ == "__main__":
    main("node_features", rows, "Microseconds of node_features.")
