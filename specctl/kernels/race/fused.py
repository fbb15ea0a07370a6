"""Triton twin of `race`: each row is split over programs, whose winners run once more.

Bits are integers and the same as `specctl.noise`'s; only the two logarithms are the device's own,
in float64. They are most of the work, so greedy rows skip them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.aot import Case
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
def _winner(score, token):
    """The largest score, and the lowest token that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, 2147483647), 0)


@triton.jit(do_not_specialize=["num_blocks"])
def heats_kernel(
    scores, tokens, law, keys, greedy, law_row, vocab_size, num_blocks, BLOCK: tl.constexpr
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    is_drawn = tl.load(greedy + row) == 0
    first = split * num_blocks * BLOCK
    last = tl.minimum(first + num_blocks * BLOCK, vocab_size)
    best = tl.full((BLOCK,), float("-inf"), tl.float64)
    winner = tl.full((BLOCK,), 0, tl.int32) + first
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < last
        score = tl.load(law + row * law_row + token, mask=inside, other=float("-inf"))
        score = score.to(tl.float64)
        if is_drawn:
            score += _gumbel(key, token)
        ahead = inside & (score > best)
        best = tl.where(ahead, score, best)
        winner = tl.where(ahead, token, winner)
    score, token = _winner(best, winner)
    at = row * tl.num_programs(1) + split
    tl.store(scores + at, score)
    tl.store(tokens + at, token)


@triton.jit(do_not_specialize=["num_splits"])
def final_kernel(ids, scores, tokens, num_splits, SPLITS: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    inside = split < num_splits
    at = row * num_splits + split
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    token = tl.load(tokens + at, mask=inside, other=2147483647)
    tl.store(ids + row, _winner(score, token)[1].to(tl.int64))


def race(law: Tensor, keys: Tensor, greedy: Tensor) -> Tensor:
    """See `specctl.kernels.race.race`."""
    num_rows, vocab_size = law.shape
    law = law if law.stride(1) == 1 else law.contiguous()
    num_blocks = _num_blocks(num_rows, vocab_size)
    num_splits = triton.cdiv(vocab_size, num_blocks * BLOCK)
    scores = torch.empty((num_rows, num_splits), dtype=torch.float64, device=law.device)
    tokens = torch.empty((num_rows, num_splits), dtype=torch.int32, device=law.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=law.device)
    if not num_rows:
        return ids
    heats_kernel[(num_rows, num_splits)](
        scores, tokens, law, keys.contiguous(), greedy.contiguous(), law.stride(0), vocab_size,
        num_blocks, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    final_kernel[(num_rows,)](ids, scores, tokens, num_splits, SPLITS=MAX_SPLITS, num_warps=1)
    return ids


def _num_blocks(num_rows: int, vocab_size: int) -> int:
    """Of a program; fewer where there are few rows."""
    blocks = triton.cdiv(vocab_size, BLOCK)
    splits = max(1, min(MAX_SPLITS, blocks, triton.cdiv(PROGRAMS, num_rows or 1)))
    return triton.cdiv(blocks, splits)


def _heats(dtype: str) -> Case:
    types = {"scores": "*fp64", "tokens": "*i32", "law": f"*{dtype}", "keys": "*i64"}
    sizes = dict.fromkeys(("law_row", "vocab_size", "num_blocks"), "i32")
    return Case(
        name=f"heats, {dtype}",
        kernel=heats_kernel,
        signature=types | {"greedy": "*i1"} | sizes | {"BLOCK": "constexpr"},
        constexprs={"BLOCK": BLOCK},
        divisible=(*types, "law_row", "vocab_size"),
        num_warps=NUM_WARPS,
        max_registers=128,
        vector_loads=True,
    )


AOT_CASES: tuple[Case, ...] = (
    *map(_heats, ("fp32", "bf16")),
    Case(
        name="final",
        kernel=final_kernel,
        signature={
            "ids": "*i64",
            "scores": "*fp64",
            "tokens": "*i32",
            "num_splits": "i32",
            "SPLITS": "constexpr",
        },
        constexprs={"SPLITS": MAX_SPLITS},
        divisible=("ids", "scores", "tokens"),
        num_warps=1,
        max_registers=40,
    ),
)
