"""Triton twins of `policy_eval`: checks, arguments, one launch each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from specctl.kernels.aot import Case, case_of
from specctl.kernels.checks import require_at_most
from specctl.kernels.policy_eval.kernel import (
    GATE_SIZES,
    GIVEN,
    JOINT,
    NETWORK,
    POOL_SIZES,
    PRUNE_SIZES,
    ROW_SIZES,
    bin_kernel,
    gate_kernel,
    phi_kernel,
    prune_kernel,
)
from specctl.kernels.policy_eval.layout import Own, PolicyBuffer
from specctl.kernels.policy_eval.results import Bins, GateState, Pruned
from specctl.kernels.tree_build.columns import Best, Pool

ROW_BLOCKS: dict[int, int] = {16: 4, 1024: 8}
GATE_BLOCKS: dict[int, int] = {16: 4, 256: 8}
"""Warps by rows of a program: few where a batch asks, many where a table is decided at once."""
MANY_ROWS = 4096
POOL_WARPS: dict[int, int] = {1024: 4, 4096: 8}
LEVEL_WARPS: dict[int, int] = {16: 1, 128: 4, 256: 4, 1024: 8}
"""Warps by slots of the pool, and by candidates of a level."""
HIDDEN_BLOCK: dict[int, int] = {16: 16, 128: 16, 256: 16, 1024: 8}
"""Hidden units at a time: as many as registers hold in float64."""
BEST_BLOCKS = (16, 64)
OWN: dict[Own, int] = {"joint": JOINT, "network": NETWORK, "given": GIVEN}


def bin_rows(params: PolicyBuffer, value: Tensor) -> Bins:
    """See `specctl.kernels.policy_eval.bin_rows`."""
    found = _bins(len(value), value.device)
    block = _rows_block(ROW_BLOCKS, len(value))
    if len(value):
        bin_kernel[(-(-len(value) // block),)](
            *found,
            value.contiguous(),
            params.header,
            params.storage,
            len(value),
            BLOCK_R=block,
            num_warps=ROW_BLOCKS[block],
        )
    return found


def choose_bins(params: PolicyBuffer, pool: Pool) -> Bins:
    """See `specctl.kernels.policy_eval.choose_bins`."""
    rows, size = pool.parent.shape
    require_at_most("choose_bins", "slots of the pool", size, max(POOL_WARPS))
    found = _bins(rows, pool.parent.device)
    block = _block(POOL_WARPS, size)
    if rows:
        phi_kernel[(rows,)](
            *found,
            pool.parent,
            pool.depth,
            pool.draft_logp,
            pool.joint_logp,
            pool.path_entropy,
            params.header,
            params.storage,
            pool.parent.stride(0),
            size,
            BLOCK_P=block,
            num_warps=POOL_WARPS[block],
        )
    return found


def close_gates(
    params: PolicyBuffer, best: Best, state: GateState, depth: int, width: int
) -> Tensor:
    """See `specctl.kernels.policy_eval.close_gates`."""
    rows, num_best = best.index.shape
    require_at_most("close_gates", "kept nodes of a level", num_best, max(BEST_BLOCKS))
    keep = torch.empty(rows, width, dtype=torch.bool, device=best.index.device)
    block_w = _block(BEST_BLOCKS, num_best)
    block = _rows_block(GATE_BLOCKS, rows) if block_w == BEST_BLOCKS[0] else min(GATE_BLOCKS)
    if rows:
        gate_kernel[(-(-rows // block),)](
            keep,
            *state,
            best.index.contiguous(),
            best.joint_logp.contiguous(),
            params.header,
            params.storage,
            rows,
            state.order.shape[1],
            state.order.stride(0),
            depth,
            width,
            num_best,
            IS_FIRST=depth == 1,
            BLOCK_R=block,
            BLOCK_W=block_w,
            num_warps=GATE_BLOCKS[block],
        )
    return keep


def prune_level(
    params: PolicyBuffer,
    pool: Pool,
    scores: Tensor,
    of_parent: Tensor | None,
    start: int,
    depth: int,
    width: int,
    extra: Tensor | None,
    *,
    top_k: int,
) -> Pruned:
    """See `specctl.kernels.policy_eval.prune_level`."""
    rows, num_nodes = len(pool.parent), pool.parent.shape[1] - start
    best = min(width, num_nodes)
    require_at_most("prune_level", "candidates of a level", num_nodes, max(LEVEL_WARPS))
    require_at_most("prune_level", "width", best, max(BEST_BLOCKS))
    found = _pruned(rows, best, pool.parent.device)
    block = _block(LEVEL_WARPS, num_nodes)
    if rows:
        prune_kernel[(rows,)](
            *found,
            scores,
            *(pool.joint_logp, pool.draft_logp, pool.entropy, pool.topk_entropy),
            pool.sibling_rank,
            None if of_parent is None else of_parent.contiguous(),
            None if extra is None else extra.contiguous(),
            params.header,
            params.storage,
            pool.parent.stride(0),
            scores.stride(0),
            start,
            depth,
            num_nodes,
            top_k,
            num_nodes // top_k,
            best,
            0 if extra is None else extra.shape[2],
            OWN=OWN[params.layout.own],
            BLOCK_C=block,
            BLOCK_W=_block(BEST_BLOCKS, best),
            BLOCK_H=HIDDEN_BLOCK[block],
            num_warps=LEVEL_WARPS[block],
        )
    return found


def _bins(rows: int, device: torch.device) -> Bins:
    whole = [torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3)]
    return Bins(*whole, torch.empty(rows, device=device))


def _pruned(rows: int, width: int, device: torch.device) -> Pruned:
    return Pruned(
        index=torch.empty(rows, width, dtype=torch.int64, device=device),
        score=torch.empty(rows, width, device=device),
        keep=torch.empty(rows, width, dtype=torch.bool, device=device),
        faulty=torch.empty(rows, dtype=torch.bool, device=device),
    )


def _rows_block(blocks: Iterable[int], rows: int) -> int:
    return max(blocks) if rows > MANY_ROWS else min(blocks)


def _block(sizes: Iterable[int], size: int) -> int:
    return next(block for block in sizes if block >= size)


# --------------------------------------------------------------------------- machine code

_TYPES = {
    "bins": "*i64", "max_depth": "*i64", "num_tokens": "*i64", "value_out": "*fp32",
    "value": "*fp32", "header": "*i32", "words": "*fp32", "parent": "*i64", "depth": "*i64",
    "draft_logp": "*fp32", "joint_logp": "*fp32", "path_entropy": "*fp32", "keep": "*i1",
    "stopped_at": "*i64", "num_kept": "*i64", "order": "*fp32", "best_index": "*i64",
    "best_logp": "*fp32", "best_score": "*fp32", "faulty": "*i1", "scores": "*fp32",
    "entropy": "*fp32", "topk_entropy": "*fp32", "sibling_rank": "*i64", "of_parent": "*fp32",
    "extra": "*fp32",
    **dict.fromkeys((*ROW_SIZES, *POOL_SIZES, *GATE_SIZES, *PRUNE_SIZES), "i32"),
}  # fmt: skip


def _case(
    name: str, kernel: Any, max_registers: int, num_warps: int = 4, **constexprs: int | None
) -> Case:
    return case_of(name, kernel, _TYPES, max_registers, num_warps, **constexprs)


def _prune_case(own: Own, block: int, max_registers: int, best: int = 16, **absent: None) -> Case:
    return _case(
        f"prune_level, {own}, {block} candidates" + "".join(f", no {name}" for name in absent),
        prune_kernel,
        max_registers,
        LEVEL_WARPS[block],
        OWN=OWN[own],
        BLOCK_C=block,
        BLOCK_W=best,
        BLOCK_H=HIDDEN_BLOCK[block],
        **absent,
    )


AOT_CASES: tuple[Case, ...] = (
    _case("bin_rows, few", bin_kernel, 32, BLOCK_R=16),
    _case("bin_rows, many", bin_kernel, 72, 8, BLOCK_R=1024),
    *(
        _case(f"choose_bins, {size} slots", phi_kernel, 88, POOL_WARPS[size], BLOCK_P=size)
        for size in POOL_WARPS
    ),
    _case("close_gates, first", gate_kernel, 48, IS_FIRST=True, BLOCK_R=16, BLOCK_W=16),
    _case("close_gates, wide", gate_kernel, 136, IS_FIRST=False, BLOCK_R=16, BLOCK_W=64),
    _case("close_gates, many", gate_kernel, 144, 8, IS_FIRST=False, BLOCK_R=256, BLOCK_W=16),
    _prune_case("network", 16, 104, of_parent=None, extra=None),
    _prune_case("network", 128, 80, extra=None),
    _prune_case("network", 256, 136),
    _prune_case("network", 1024, 192, best=64),
    _prune_case("joint", 128, 40, extra=None),
    _prune_case("given", 256, 40),
)
"""Rows are not read 16 bytes at a time: levels begin anywhere in a row, and rows anywhere in
memory."""
