"""`js_distance` in Triton: every row is cut into splits, so that few rows fill the chip too.

sums         each split of both laws: maximum and sum of exponentials, two launches
divergence   each split of the draft vocabulary, once more, beside the target's logits of the
             same tokens; the target's other tokens need no second look, as their terms add up
             to log 2 times the mass that is left
distance     each row
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specctl.kernels.aot import Case
from specctl.kernels.checks import require_at_most
from specctl.kernels.js_distance.kernel import distance_kernel, divergence_kernel, sums_kernel

MAX_VOCAB = 1 << 20
SUMS_BLOCK, DIVERGENCE_BLOCK = 4096, 2048
"""Logits of a program; the second gathers, which takes a register for every address."""


def js_distance(draft_logits: Tensor, target_logits: Tensor, target_ids: Tensor) -> Tensor:
    """See `specctl.kernels.js_distance.js_distance`.

    Four launches, no synchronisation. Rows may be strided; logits that are not next to one
    another in a row are copied.

    Raises:
        UsageError: a vocabulary above 2^20.
    """
    require_at_most("js_distance", "vocabulary", target_logits.shape[1], MAX_VOCAB)
    draft, target = (
        x if x.stride(1) == 1 else x.contiguous() for x in (draft_logits, target_logits)
    )
    (num_rows, draft_size), vocab_size = draft.shape, target.shape[1]
    distance = torch.empty(num_rows, device=draft.device)
    if num_rows == 0:
        return distance
    draft_sums, target_sums = _sums(draft), _sums(target)
    num_splits = triton.cdiv(draft_size, DIVERGENCE_BLOCK)
    parts = torch.empty(2, num_rows, num_splits, device=draft.device)
    divergence_kernel[(num_rows * num_splits,)](
        draft,
        draft.stride(0),
        draft_size,
        draft_sums,
        draft_sums.shape[2],
        target,
        target.stride(0),
        target_sums,
        target_sums.shape[2],
        target_ids.contiguous(),
        parts,
        num_splits,
        num_rows,
        BLOCK=DIVERGENCE_BLOCK,
        DRAFT_PARTS=_parts(draft_size, SUMS_BLOCK),
        TARGET_PARTS=_parts(vocab_size, SUMS_BLOCK),
        num_warps=4,
    )
    distance_kernel[(num_rows,)](
        parts,
        distance,
        num_splits,
        num_rows,
        SAYS_ALL=draft_size == vocab_size,
        PARTS=_parts(draft_size, DIVERGENCE_BLOCK),
        num_warps=1,
    )
    return distance


def _sums(logits: Tensor) -> Tensor:
    """`[2, R, splits]` float32: maxima and sums of exponentials."""
    num_rows, vocab_size = logits.shape
    num_splits = triton.cdiv(vocab_size, SUMS_BLOCK)
    parts = torch.empty(2, num_rows, num_splits, device=logits.device)
    sums_kernel[(num_rows * num_splits,)](
        logits,
        logits.stride(0),
        vocab_size,
        parts,
        num_splits,
        num_rows,
        BLOCK=SUMS_BLOCK,
        num_warps=4,
    )
    return parts


def _parts(size: int, block: int) -> int:
    return int(triton.next_power_of_2(triton.cdiv(size, block)))


def _case(
    name: str, kernel: Any, pointers: dict[str, str], constexprs: dict[str, Any], max_registers: int
) -> Case:
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {argument: f"*{dtype}" for argument, dtype in pointers.items()}
    strides = {"row_stride", "vocab_size", "draft_stride", "draft_size", "target_stride"}
    return Case(
        name=name,
        kernel=kernel,
        signature=types | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        divisible=(*pointers, *(strides & set(kernel.arg_names))),
        num_warps=1 if kernel is distance_kernel else 4,
        max_registers=max_registers,
        vector_loads=kernel is not distance_kernel,
    )


def _sums_case(dtype: str, max_registers: int) -> Case:
    pointers = {"logits": dtype, "parts": "fp32"}
    return _case(f"sums, {dtype}", sums_kernel, pointers, {"BLOCK": SUMS_BLOCK}, max_registers)


def _divergence_case(dtype: str, max_registers: int) -> Case:
    pointers = {"draft": dtype, "draft_sums": "fp32", "target": dtype, "target_sums": "fp32"}
    pointers |= {"target_ids": "i64", "parts": "fp32"}
    constexprs = {"BLOCK": DIVERGENCE_BLOCK, "DRAFT_PARTS": _parts(32_000, SUMS_BLOCK)}
    constexprs |= {"TARGET_PARTS": _parts(128_256, SUMS_BLOCK)}
    name = f"divergence, {dtype}"
    return _case(name, divergence_kernel, pointers, constexprs, max_registers)


_DISTANCE = {"SAYS_ALL": False, "PARTS": _parts(32_000, DIVERGENCE_BLOCK)}
AOT_CASES = (
    _sums_case("bf16", 64),
    _sums_case("fp32", 64),
    _divergence_case("bf16", 72),
    _divergence_case("fp32", 72),
    _case("distance", distance_kernel, {"parts": "fp32", "distance": "fp32"}, _DISTANCE, 24),
)
