"""Sort keys of logits: integers in the order "larger value first, then lower place".

A key holds a value's bits, made monotone, above the complement of its place. So `tl.topk` of keys
is exact, has one answer where values are equal, and carries the places along.

    16-bit logits    int32: 16 bits of value, 16 of place
    float32          int64: 32 bits of value, 31 of place
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (arguments are pointers and constants)

from __future__ import annotations

import triton
import triton.language as tl

from specctl.kernels.ranking import order_bits, score_of


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
    """Where a key's value came from, int32."""
    if keys.dtype.primitive_bitwidth == 32:
        place = 0xFFFF - (keys & 0xFFFF)
    else:
        place = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
    return place


@triton.jit
def value_of(keys, DTYPE: tl.constexpr):
    """The logit, in float32; `DTYPE` is the one that the key was made of."""
    if keys.dtype.primitive_bitwidth == 32:
        bits = keys >> 16
        bits = bits ^ ((bits >> 31) & 0x7FFF)
        value = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    else:
        value = score_of((keys >> 32).to(tl.int32))
    return value
