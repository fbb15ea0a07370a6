"""Order of scores inside a Triton kernel: the one of `torch.sort(descending=True, stable=True)`.

Imported by kernels only, as it needs Triton.
"""

# ruff: noqa: ANN001, ANN201, N803  (arguments are pointers and constants)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_bits(score):
    """int32 that grow with float32 scores: the two zeros are equal, NaN of any sign is highest."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score == score, bits, 0x7FFFFFFF)


@triton.jit
def score_of(bits):
    """The score that `order_bits` made these of; -0.0 has become 0.0."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(score, exists, num_best, BLOCK: tl.constexpr, BLOCK_BEST: tl.constexpr):
    """The best entries of a vector, best first, ties to the earlier: places, scores, who they are.

    One reduction for each of them, which for the widths of drafting (3 to 16) is less than a sort.
    A place of what does not exist, or beyond `num_best`, is arbitrary.
    """
    places = tl.arange(0, BLOCK)
    ranks = tl.arange(0, BLOCK_BEST)
    nothing = tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    keys = (order_bits(score).to(tl.int64) << 32) | (BLOCK - 1 - places).to(tl.int64)
    keys = tl.where(exists, keys, nothing)
    found = tl.zeros((BLOCK_BEST,), tl.int64)
    for rank in range(num_best):
        best = tl.max(keys, 0)
        found = tl.where(ranks == rank, best, found)
        keys = tl.where(keys == best, nothing, keys)
    place = BLOCK - 1 - (found & 0xFFFFFFFF).to(tl.int32)
    return place, score_of((found >> 32).to(tl.int32)), exists & (keys == nothing)
