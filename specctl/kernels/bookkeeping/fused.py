"""Triton twins of `bookkeeping`: arguments, one launch each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from specctl.kernels.aot import Case, case_of
from specctl.kernels.bookkeeping.columns import FACTS, Laid, Opened, Settled, Walked
from specctl.kernels.bookkeeping.kernel import (
    LAY_SIZES,
    LEVEL_SIZES,
    ROOT_SIZES,
    SETTLE_SIZES,
    lay_out_kernel,
    open_level_kernel,
    open_tree_kernel,
    settle_kernel,
)
from specctl.kernels.checks import require_at_most
from specctl.kernels.tree_build.columns import WORD_BITS, BuiltTree, Pool

POOL_BLOCK, POOL_WARPS = 1024, 4
LEVEL_BLOCK, LEVEL_WORDS, LEVEL_WARPS = 16, 8, 1
"""Nodes and words of a program; one warp, so that it waits for nobody."""
NODE_BLOCK = 64
LAY_WARPS: dict[int, int] = {2: 2, 8: 2, 32: 4}
"""By words of 32 nodes: trees of up to 64, 256 and 1,024."""
ROW_BLOCKS = (64, 1024)
"""Rows that a program adds up."""
STEP_BLOCKS = (16, 128)
SETTLE_BLOCK, SETTLE_WARPS = 1024, 8
"""Slots of the pool at a time: all of them in one step but for the largest pools."""


def open_tree(pool: Pool, root_ids: Tensor, vacant: Tensor, opened: Opened) -> None:
    """See `specctl.kernels.bookkeeping.open_tree`."""
    rows, size = pool.parent.shape
    if not rows:
        return
    open_tree_kernel[(rows, -(-size // POOL_BLOCK))](
        *pool,
        opened.slots,
        opened.keep,
        root_ids.contiguous(),
        vacant.contiguous(),
        pool.parent.stride(0),
        opened.slots.stride(0),
        size,
        BLOCK_P=POOL_BLOCK,
        num_warps=POOL_WARPS,
    )


def open_level(
    pool: Pool,
    slots: Tensor,
    keep: Tensor,
    vacant: Tensor,
    stable: Tensor,
    above: Tensor | None,
    opened: Opened,
    start: int,
    top_k: int,
    depth: int,
    behind: int,
) -> None:
    """See `specctl.kernels.bookkeeping.open_level`."""
    (rows, width), num_words = slots.shape, opened.words.shape[2]
    if not slots.numel():
        return
    seen = None if above is None or depth == 1 else dense(above)
    open_level_kernel[(rows, -(-width // LEVEL_BLOCK))](
        *opened,
        pool.token_ids,
        slots,
        keep,
        vacant.contiguous(),
        stable.contiguous(),
        seen,
        pool.parent.stride(0),
        *slots.stride(),
        *keep.stride(),
        *((0, 0) if seen is None else seen.stride()[:2]),
        opened.slots.stride(0),
        *opened.words.stride()[:2],
        start,
        top_k,
        depth,
        behind,
        width,
        num_words,
        BLOCK_W=LEVEL_BLOCK,
        BLOCK_WORDS=LEVEL_WORDS,
        num_warps=LEVEL_WARPS,
    )


def lay_out(
    tree: BuiltTree, prefix: Tensor, positions: Tensor, num_tokens: int, last_place: int
) -> Laid:
    """See `specctl.kernels.bookkeeping.lay_out`."""
    rows, columns, num_words = tree.ancestor_bits.shape
    require_at_most("lay_out", "nodes of a tree", columns, WORD_BITS * max(LAY_WARPS))
    block = _block(LAY_WARPS, num_words)
    laid = _empty(rows, columns, num_words, num_tokens, prefix.device)
    given = (tree.token_ids, tree.position_ids, tree.depth, tree.ancestor_bits, tree.num_nodes)
    programs = rows * -(-columns // NODE_BLOCK) + -(-num_tokens // NODE_BLOCK)
    lay_out_kernel[(programs,)](
        *laid,
        *(tensor.contiguous() for tensor in (*given, prefix, positions)),
        rows,
        columns,
        num_words,
        num_tokens,
        last_place,
        BLOCK_B=_block(ROW_BLOCKS, rows),
        BLOCK_N=NODE_BLOCK,
        BLOCK_WORDS=block,
        num_warps=LAY_WARPS[block],
    )
    return laid


def settle(found: Walked, settled: Settled) -> None:
    """See `specctl.kernels.bookkeeping.settle`."""
    rows, steps = found.path.shape
    require_at_most("settle", "nodes of a path", steps, max(STEP_BLOCKS))
    if not rows:
        return
    given = found._replace(
        **{name: dense(getattr(found, name)) for name in TABLES},
        **{name: getattr(found, name).contiguous() for name in COLUMNS},
    )
    sizes = (found.node_at.shape[1], len(found.best), found.parent.shape[1])
    longest = max(sizes[0], sizes[2], found.submitted.shape[1])
    settle_kernel[(rows,)](
        *settled,
        *given,
        settled.outcome.stride(0),
        settled.path.stride(0),
        *(getattr(given, name).stride(0) for name in TABLES),
        found.best.stride(0),
        steps,
        *sizes,
        found.submitted.shape[1],
        longest,
        NUM_FACTS=len(FACTS),
        BLOCK_D=_block(STEP_BLOCKS, steps),
        BLOCK=SETTLE_BLOCK,
        num_warps=SETTLE_WARPS,
    )


TABLES = ("path", "token_ids", "node_at", "parent", "depth", "submitted")
COLUMNS = ("num_nodes", "offsets", "faulty", "stable")


def dense(tensor: Tensor) -> Tensor:
    """Itself where the last axis is dense; rows may lie apart."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _empty(rows: int, columns: int, num_words: int, num_tokens: int, device: torch.device) -> Laid:
    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    words = torch.empty(num_tokens, num_words, dtype=torch.int32, device=device)
    axis = [integers(num_tokens) for _ in range(5)]
    return Laid(integers(rows + 1), *axis, words, integers(rows, columns))


def _block(sizes: Iterable[int], size: int) -> int:
    return next(block for block in sizes if block >= size)


# --------------------------------------------------------------------------- machine code

_OTHERS = {
    **dict.fromkeys(
        ("draft_logp", "joint_logp", "entropy", "topk_entropy", "path_entropy"), "*fp32"
    ),
    **dict.fromkeys(("expanded", "keep", "out_keep", "vacant", "faulty"), "*i1"),
    **dict.fromkeys(("out_words", "above", "bits"), "*i32"),
    **dict.fromkeys((*ROOT_SIZES, *LEVEL_SIZES, *LAY_SIZES, *SETTLE_SIZES), "i32"),
}
"""Types of arguments that are no pointers to int64."""


def _case(
    name: str, kernel: Any, max_registers: int, num_warps: int, best: str = "", **constexprs: Any
) -> Case:
    types = dict.fromkeys(kernel.arg_names, "*i64") | _OTHERS | {"best": f"*{best}"}
    return case_of(name, kernel, types, max_registers, num_warps, **constexprs)


def _level_case(name: str, **absent: None) -> Case:
    blocks = {"BLOCK_W": LEVEL_BLOCK, "BLOCK_WORDS": LEVEL_WORDS}
    return _case(name, open_level_kernel, 72, LEVEL_WARPS, **blocks, **absent)


def _lay_case(rows: int, words: int, max_registers: int) -> Case:
    blocks = {"BLOCK_B": rows, "BLOCK_N": NODE_BLOCK, "BLOCK_WORDS": words}
    name = f"lay_out, {rows} rows, {words} words"
    return _case(name, lay_out_kernel, max_registers, LAY_WARPS[words], **blocks)


def _settle_case(steps: int, best: str) -> Case:
    blocks = {"NUM_FACTS": len(FACTS), "BLOCK_D": steps, "BLOCK": SETTLE_BLOCK}
    name = f"settle, {steps} steps, {best}"
    return _case(name, settle_kernel, 88, SETTLE_WARPS, best, **blocks)


AOT_CASES: tuple[Case, ...] = (
    _case("open_tree", open_tree_kernel, 40, POOL_WARPS, BLOCK_P=POOL_BLOCK),
    _level_case("open_level, below the root", above=None),
    _level_case("open_level, deeper"),
    _lay_case(64, 2, 72),
    _lay_case(1024, 2, 72),
    _lay_case(64, 8, 72),
    _lay_case(1024, 32, 136),
    *(_settle_case(16, best) for best in ("fp32", "bf16", "fp16")),
    _settle_case(128, "bf16"),
)
"""Rows are not read 16 bytes at a time: they begin anywhere in memory."""
