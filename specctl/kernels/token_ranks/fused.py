"""`token_ranks` in Triton: one launch, one program a row.

A round verifies 48 to 2,000 rows, half of which are asked for a token. Few rows leave most of the
chip to decoding, which runs beside the collector; many fill it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specctl.kernels.aot import Case
from specctl.kernels.checks import require_at_most
from specctl.kernels.token_ranks.kernel import ranks_kernel

MAX_TOKENS = 32
NUM_WARPS = 8
COUNTERS = 16_384
"""Of a program: 64 registers of a thread."""
MAX_BLOCK = 1024


def token_ranks(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specctl.kernels.token_ranks.token_ranks`.

    One launch, no synchronisation. Rows may be strided; logits that are not next to one another
    in a row are copied.

    Raises:
        UsageError: more than 32 tokens a row.
    """
    (num_rows, vocab_size), num_tokens = logits.shape, tokens.shape[1]
    require_at_most("token_ranks", "tokens", num_tokens, MAX_TOKENS)
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    log_sum_exp = torch.empty(num_rows, device=x.device)
    top_two = torch.empty(num_rows, 2, device=x.device)
    found = torch.empty(num_rows, num_tokens, device=x.device)
    num_larger = torch.empty(num_rows, num_tokens, dtype=torch.int64, device=x.device)
    out = (log_sum_exp, top_two, found, num_larger)
    if num_rows:
        width = width_of(num_tokens)
        ranks_kernel[(num_rows,)](
            x,
            x.stride(0),
            vocab_size,
            tokens.contiguous(),
            *out,
            NUM_TOKENS=num_tokens,
            WIDTH=width,
            BLOCK=block_of(width),
            num_warps=NUM_WARPS,
        )
    return out


def width_of(num_tokens: int) -> int:
    """Places for a row's tokens."""
    return int(triton.next_power_of_2(max(1, num_tokens)))


def block_of(width: int) -> int:
    """Logits of a step."""
    return min(MAX_BLOCK, COUNTERS // width)


def _case(dtype: str, num_tokens: int, max_registers: int) -> Case:
    pointers = {"logits": dtype, "tokens": "i64", "log_sum_exp": "fp32", "top_two": "fp32"}
    pointers |= {"found": "fp32", "num_larger": "i64"}
    width = width_of(num_tokens)
    constexprs = {"NUM_TOKENS": num_tokens, "WIDTH": width, "BLOCK": block_of(width)}
    types = dict.fromkeys(ranks_kernel.arg_names, "i32")
    types |= {argument: f"*{kind}" for argument, kind in pointers.items()}
    return Case(
        name=f"{dtype}, {num_tokens} tokens",
        kernel=ranks_kernel,
        signature=types | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        divisible=(*pointers, "row_stride", "vocab_size"),
        num_warps=NUM_WARPS,
        max_registers=max_registers,
    )


AOT_CASES = (_case("bf16", 10, 168), _case("bf16", 1, 48), _case("fp32", 10, 168))
