"""Triton kernel of `token_ranks`: one launch, one program a row.

A round verifies 48 to 2,000 rows, half of which ask for a token. Few rows leave most of the chip to
decoding, which runs beside the collector; many fill it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.checks import dense_rows, require_at_most
from specctl.kernels.ordering import LOWEST

MAX_TOKENS = 32
NUM_WARPS = 8
COUNTERS = 16_384
"""Of a program: 64 registers of a thread."""
MAX_BLOCK = 1024


@triton.jit
def ranks_kernel(
    logits, row_stride, vocab_size, tokens, log_sum_exp, top_two, found, num_larger, NUM_TOKENS:
    tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, in steps of BLOCK logits; every place of a step keeps sums of its own."""
    row = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, WIDTH)
    is_column = child < NUM_TOKENS
    token = tl.load(tokens + row * NUM_TOKENS + child, mask=is_column, other=-1)
    here = logits + row * row_stride
    is_token = token >= 0
    # Nothing is larger than what stands for no token.
    bound = tl.load(here + token, mask=is_token, other=float("inf")).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    one = tl.full([BLOCK], float("-inf"), tl.float32)
    two = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK, WIDTH], tl.int32)
    is_idle = tl.max(token, 0) < 0
    for start in range(0, tl.where(is_idle, 0, vocab_size), BLOCK):
        place = start + lane
        x = tl.load(here + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32)
        larger += (x[:, None] > bound[None, :]).to(tl.int32)
        two = tl.maximum(two, tl.minimum(one, x))
        before = tl.maximum(one, LOWEST)
        one = tl.maximum(one, x)
        best = tl.maximum(one, LOWEST)
        total = total * tl.exp(before - best) + tl.exp(x - best)
    top = tl.max(one, 0)
    rest = tl.where(lane == tl.argmax(one, 0), two, one)
    top_best = tl.maximum(top, LOWEST)
    sums = tl.sum(total * tl.exp(tl.maximum(one, LOWEST) - top_best), 0)
    log_total = top_best + tl.log(tl.where(is_idle, 1.0, sums))
    tl.store(log_sum_exp + row, tl.where(is_idle, 0.0, log_total))
    tl.store(top_two + 2 * row, tl.where(is_idle, 0.0, top))
    tl.store(top_two + 2 * row + 1, tl.where(is_idle, 0.0, tl.max(rest, 0)))
    out = row * NUM_TOKENS + child
    tl.store(found + out, tl.where(is_token, bound, 0.0), mask=is_column)
    tl.store(num_larger + out, tl.sum(larger, 0).to(tl.int64), mask=is_column)


def token_ranks(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, (num_rows, num_tokens) = dense_rows(logits), tokens.shape
    require_at_most("token_ranks", "tokens", num_tokens, MAX_TOKENS)
    out = (
        torch.empty(num_rows, device=x.device),
        torch.empty(num_rows, 2, device=x.device),
        torch.empty(num_rows, num_tokens, device=x.device),
        tokens.new_empty(num_rows, num_tokens),
    )
    if num_rows:
        width = triton.next_power_of_2(max(1, num_tokens))
        ranks_kernel[(num_rows,)](
            x, x.stride(0), x.shape[1], tokens.contiguous(), *out,
            NUM_TOKENS=num_tokens, WIDTH=width, BLOCK=min(MAX_BLOCK, COUNTERS // width),
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
