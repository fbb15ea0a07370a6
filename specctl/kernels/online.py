"""Sums of exponentials in parts, for kernels that split a row (imported by fused kernels only).

A part is its maximum and sums relative to it, so that nothing overflows; parts are brought to the
row's maximum by `weights_of`.
"""

# ruff: noqa: ANN001, ANN201  (arguments are tensors of Triton)

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""Stands for -inf where infinities would meet: a part of nothing but -inf, 0 · (-inf)."""


@triton.jit
def weights_of(best):
    """The largest of the parts' maxima `[S]`, and what a sum relative to each weighs below it."""
    top = tl.max(best, 0)
    return top, tl.exp(best - top)
