"""Triton kernels of `sample_tokens`: each row is split over programs, then their best are compared.

Bits are integers and the same as `specctl.noise`'s; only the two logarithms are the device's own,
in float64. They are most of the work, so greedy rows skip them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.checks import ceil_div, dense_rows, require_at_most
from specctl.noise import FIRST, GOLDEN, SECOND, UNIFORM_BITS

BLOCK, NUM_WARPS, MAX_SPLITS = 1024, 4, 64
PROGRAMS = 512
"""About four on each multiprocessor of an H200: enough to keep its float64 units busy."""
_GOLDEN, _FIRST, _SECOND = (tl.constexpr(word % 2**64) for word in (GOLDEN, FIRST, SECOND))
_DROPPED, _CELL = tl.constexpr(64 - UNIFORM_BITS), tl.constexpr(2.0**-UNIFORM_BITS)


@triton.jit
def _gumbel(key, token):
    """`specctl.noise.gumbels`, token by token."""
    x = key + (token + 1).to(tl.uint64) * _GOLDEN
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    x = (x ^ (x >> 31)) >> _DROPPED
    uniform = (x.to(tl.int64).to(tl.float64) + 0.5) * _CELL
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best(score, token):
    """The largest score, and the lowest token that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, 2147483647), 0)


@triton.jit(do_not_specialize=["num_blocks"])
def split_kernel(
    scores, tokens, logits, keys, greedy, logits_row, vocab_size, num_blocks, BLOCK: tl.constexpr
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    is_drawn = tl.load(greedy + row) == 0
    first = split * num_blocks * BLOCK
    last = tl.minimum(first + num_blocks * BLOCK, vocab_size)
    best = tl.full((BLOCK,), float("-inf"), tl.float64)
    chosen = tl.full((BLOCK,), 0, tl.int32) + first
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < last
        score = tl.load(logits + row * logits_row + token, mask=inside, other=float("-inf"))
        score = score.to(tl.float64)
        if is_drawn:
            score += _gumbel(key, token)
        ahead = inside & (score > best)
        best = tl.where(ahead, score, best)
        chosen = tl.where(ahead, token, chosen)
    score, token = _best(best, chosen)
    at = row * tl.num_programs(1) + split
    tl.store(scores + at, score)
    tl.store(tokens + at, token)


@triton.jit(do_not_specialize=["num_splits"])
def best_kernel(ids, scores, tokens, num_splits, SPLITS: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    inside = split < num_splits
    at = row * num_splits + split
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    token = tl.load(tokens + at, mask=inside, other=2147483647)
    tl.store(ids + row, _best(score, token)[1].to(tl.int64))


def sample_tokens(logits: Tensor, keys: Tensor, greedy: Tensor) -> Tensor:
    logits = dense_rows(logits)
    num_rows, vocab_size = logits.shape
    require_at_most("sample_tokens", "tokens", vocab_size, 2**31 - 1)
    ids = keys.new_empty(num_rows)
    if not num_rows:
        return ids
    blocks = ceil_div(vocab_size, BLOCK)
    splits = max(1, min(MAX_SPLITS, blocks, ceil_div(PROGRAMS, num_rows)))
    num_blocks = ceil_div(blocks, splits)
    num_splits = ceil_div(vocab_size, num_blocks * BLOCK)
    scores = logits.new_empty(num_rows, num_splits, dtype=torch.float64)
    tokens = logits.new_empty(num_rows, num_splits, dtype=torch.int32)
    split_kernel[(num_rows, num_splits)](
        scores, tokens, logits, keys.contiguous(), greedy.contiguous(), logits.stride(0),
        vocab_size, num_blocks, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    best_kernel[(num_rows,)](ids, scores, tokens, num_splits, SPLITS=MAX_SPLITS, num_warps=1)
    return ids
