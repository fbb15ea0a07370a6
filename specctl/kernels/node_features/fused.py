"""`node_features` in Triton: one read of the logits by many programs, then a merge of each row.

A row is cut three ways, each into runs of neighbours:

    split    BLOCK logits, one program of the scan: maximum, sum and mean of the exponentials
    node     NODE logits of a split: their maximum
    leaf     32 logits of a node: their maximum

The K best logits stand in the K nodes of largest maximum, and there in the K leaves of largest
maximum, equal ones taken from the left. So the merge looks at all nodes, at the leaves of K nodes
and at the logits of K leaves, and sorts some 10³ numbers of a row instead of 10⁵.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specctl.kernels.aot import Case
from specctl.kernels.checks import require_at_most
from specctl.kernels.node_features.kernel import merge_kernel, scan_kernel

OP = "node_features"
LEAF = 32
BLOCKS = (4096, 2048, 1024)
"""Logits of a program, best first; 4096 in float32 fill 32 registers of a thread."""
MIN_PROGRAMS = 264
"""Two for each multiprocessor of an H100 or H200; with fewer, the chip waits for memory."""
NODES = ((1 << 16, 256), (1 << 18, 1024), (1 << 20, 4096))
"""Vocabulary up to which, and logits of a node: at most 256 nodes a row."""
MAX_VOCAB = NODES[-1][0]
MAX_TOP_K = 32
MAX_LEAVES = (1 << 31) - 1
"""Of all rows; int32 counts them."""


class Config(NamedTuple):
    """How a call is cut, chosen by its number of rows and the vocabulary.

    Attributes:
        scan_block: logits of a split. node: logits of a node. num_slots: of a row's nodes, a
            power of two. num_parts: splits of a row that the merge has room for, likewise.
        merge_warps: few rows wait for one another's latency, many for the issue of instructions.
    """

    scan_block: int
    node: int
    num_slots: int
    num_parts: int
    merge_warps: int


def config_of(num_rows: int, vocab_size: int, width: int) -> Config:
    """The tuned cut; only `scan_block` and `merge_warps` depend on the rows.

    Args:
        width: K, a power of two.
    """
    filling = [b for b in BLOCKS if num_rows * triton.cdiv(vocab_size, b) >= MIN_PROGRAMS]
    node = next(node for limit, node in NODES if vocab_size <= limit)
    return Config(
        scan_block=max(filling[0] if filling else BLOCKS[-1], node),
        node=node,
        num_slots=max(width, triton.next_power_of_2(triton.cdiv(vocab_size, node))),
        num_parts=triton.next_power_of_2(triton.cdiv(vocab_size, max(BLOCKS[-1], node))),
        merge_warps=8 if num_rows < MIN_PROGRAMS else 4,
    )


def node_features(logits: Tensor, top_k: int, entropy_top_k: int) -> tuple[Tensor, ...]:
    """See `specctl.kernels.node_features.node_features`.

    Two launches, no synchronisation. Rows may be strided; logits that are not next to one
    another in a row are copied.

    Raises:
        UsageError: K above 32, a vocabulary above 2^20, or too many rows.
    """
    *shape, vocab_size = logits.shape
    entropy_top_k = min(entropy_top_k, vocab_size)
    num_rows = math.prod(shape)
    _check_capacity(num_rows, vocab_size, max(top_k, entropy_top_k))
    x = logits.reshape(-1, vocab_size)
    x = x if x.stride(1) == 1 else x.contiguous()
    ids = torch.empty(num_rows, top_k, dtype=torch.int64, device=x.device)
    logp = torch.empty(num_rows, top_k, device=x.device)
    top_two = torch.empty(num_rows, 2, device=x.device)
    scalars = torch.empty(3, num_rows, device=x.device)
    if num_rows:
        _launch(x, top_k, entropy_top_k, (ids, logp, top_two, scalars))
    entropy, topk_entropy, log_sum_exp = (s.view(shape) for s in scalars)
    return (
        ids.view(*shape, top_k),
        logp.view(*shape, top_k),
        entropy,
        topk_entropy,
        log_sum_exp,
        top_two.view(*shape, 2),
    )


def _check_capacity(num_rows: int, vocab_size: int, count: int) -> None:
    require_at_most(OP, "top_k", count, MAX_TOP_K)
    require_at_most(OP, "vocabulary", vocab_size, MAX_VOCAB)
    num_leaves = num_rows * triton.cdiv(vocab_size, BLOCKS[0]) * BLOCKS[0] // LEAF
    require_at_most(OP, "leaves of 32 logits", num_leaves, MAX_LEAVES)


def _launch(x: Tensor, top_k: int, entropy_top_k: int, out: tuple[Tensor, ...]) -> None:
    num_rows, vocab_size = x.shape
    width = triton.next_power_of_2(max(top_k, entropy_top_k, 2))
    config = config_of(num_rows, vocab_size, width)
    num_splits = triton.cdiv(vocab_size, config.scan_block)
    num_programs, nodes = num_rows * num_splits, config.scan_block // config.node
    parts = torch.empty(3, num_rows, num_splits, device=x.device)
    node_max = torch.empty(num_programs * nodes, dtype=x.dtype, device=x.device)
    leaf_max = torch.empty(num_programs * config.scan_block // LEAF, dtype=x.dtype, device=x.device)
    scan_kernel[(num_programs,)](
        x,
        x.stride(0),
        vocab_size,
        leaf_max,
        node_max,
        parts,
        num_splits,
        num_rows,
        BLOCK=config.scan_block,
        NODE=config.node,
        LEAF=LEAF,
        num_warps=4,
    )
    merge_kernel[(num_rows,)](
        x,
        x.stride(0),
        vocab_size,
        leaf_max,
        node_max,
        parts,
        *out,
        num_splits,
        num_splits * nodes,
        num_rows,
        TOP_K=top_k,
        ENTROPY_TOP_K=entropy_top_k,
        WIDTH=width,
        SLOTS=config.num_slots,
        PARTS=config.num_parts,
        LEAVES=config.node // LEAF,
        LEAF=LEAF,
        num_warps=config.merge_warps,
    )


def _scan_case(dtype: str, block: int, node: int, max_registers: int) -> Case:
    pointers = {"logits": dtype, "leaf_max": dtype, "node_max": dtype, "parts": "fp32"}
    constexprs = {"BLOCK": block, "NODE": node, "LEAF": LEAF}
    return _case(f"scan, {block} {dtype}", scan_kernel, pointers, constexprs, max_registers, 4)


def _merge_case(dtype: str, vocab_size: int, num_rows: int, top_k: int, max_registers: int) -> Case:
    pointers = {"logits": dtype, "leaf_max": dtype, "node_max": dtype, "parts": "fp32"}
    pointers |= {"ids": "i64", "logp": "fp32", "top_two": "fp32", "scalars": "fp32"}
    width = triton.next_power_of_2(top_k)
    config = config_of(num_rows, vocab_size, width)
    constexprs = {"TOP_K": top_k, "ENTROPY_TOP_K": top_k, "WIDTH": width, "LEAF": LEAF}
    constexprs |= {"SLOTS": config.num_slots, "PARTS": config.num_parts}
    constexprs |= {"LEAVES": config.node // LEAF}
    name = f"merge, {num_rows} x {vocab_size} {dtype}, top {top_k}"
    return _case(name, merge_kernel, pointers, constexprs, max_registers, config.merge_warps)


def _case(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    constexprs: dict[str, int],
    max_registers: int,
    num_warps: int,
) -> Case:
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {argument: f"*{dtype}" for argument, dtype in pointers.items()}
    return Case(
        name=name,
        kernel=kernel,
        signature=types | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        divisible=(*pointers, "row_stride", "vocab_size"),
        num_warps=num_warps,
        max_registers=max_registers,
        vector_loads=kernel is scan_kernel,
    )


AOT_CASES = (
    _scan_case("bf16", 4096, 1024, 64),
    _scan_case("bf16", 1024, 256, 40),
    _scan_case("fp32", 4096, 1024, 72),
    _merge_case("bf16", 128_256, 600, 10, 64),
)
LARGE_AOT_CASES = (
    _merge_case("bf16", 128_256, 60, 10, 64),
    _merge_case("fp32", 32_000, 60, 10, 64),
    _merge_case("bf16", 151_936, 600, 32, 64),
)
