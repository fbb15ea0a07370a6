"""Order of scores inside Triton kernels: that of `torch.sort(descending=True, stable=True)`.

A sort key holds a value's bits, made monotone, above the complement of its place. So the largest
key is exact, has one answer where values are equal, and carries the place along.

    16-bit logits    int32: 16 bits of value, 16 of place
    float32          int64: 32 bits of value, 31 of place

Only fused kernels import this module, as it needs Triton.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (arguments are pointers and constants)
from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""Stands for -inf where infinities would meet: a row part of nothing but -inf, 0 · (-inf)."""


@triton.jit
def order_bits(score):
    """int32 that grow with float32 scores: the two zeros are equal, NaN of any sign is highest."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score == score, bits, 0x7FFFFFFF)


@triton.jit
def score_of(bits):
    """The score of `order_bits`; -0.0 has become 0.0."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(score, exists, num_best, BLOCK: tl.constexpr, BLOCK_BEST: tl.constexpr):
    """The best entries of a vector, best first, ties to the earlier: places, scores, membership.

    One reduction each, which for the widths of drafting (3 to 16) costs less than a sort.
    A place beyond the existing entries or `num_best` is arbitrary.
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


@triton.jit
def sort_keys(x, place):
    """Keys of logits at places; the two zeros are equal, NaN is above everything (as in torch)."""
    if x.dtype.primitive_bitwidth == 16:
        keys = (_order_bits_of_half(x) << 16) | (0xFFFF - place)
    else:
        keys = (order_bits(x).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    return keys


@triton.jit
def _order_bits_of_half(x):
    """As `order_bits`, of 16 bits: those below the sign of negatives flip."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFF)
    value = x.to(tl.float32)
    return tl.where(value == value, tl.where(value == 0.0, 0, bits), 0x7FFF)


@triton.jit
def place_of(keys):
    """Place that a key's value came from, int32."""
    if keys.dtype.primitive_bitwidth == 32:
        place = 0xFFFF - (keys & 0xFFFF)
    else:
        place = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
    return place


@triton.jit
def value_of(keys, DTYPE: tl.constexpr):
    """The logit, in float32; `DTYPE` is that of the logits."""
    if keys.dtype.primitive_bitwidth == 32:
        bits = keys >> 16
        bits = bits ^ ((bits >> 31) & 0x7FFF)
        value = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        value = score_of((keys >> 32).to(tl.int32))
    return value
