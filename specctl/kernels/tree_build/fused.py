"""Triton twins of `tree_build`: checks, arguments, one launch each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specctl.kernels.aot import Case, case_of
from specctl.kernels.checks import require_at_most
from specctl.kernels.tree_build.columns import WORD_BITS, Best, BuiltTree, Children, Pool
from specctl.kernels.tree_build.kernel import LEVEL_SIZES, TREE_SIZES, append_kernel, tree_kernel

LEVEL_WARPS: dict[int, int] = {16: 1, 128: 2, 256: 4, 1024: 8}
"""Warps by candidates of a level."""
BEST_BLOCKS = (16, 64)
POOL_WARPS: dict[int, int] = {512: 4, 1024: 8, 4096: 16}
TREE_WARPS: dict[int, int] = {64: 4, 256: 8, 1024: 16}
LINK_WARPS: dict[int, int] = {64: 2, 256: 4, 1024: 16}
"""Warps by slots of the pool and of the tree, of the two the more; and where links are all."""
CHUNKS: dict[int, int] = {64: 16, 256: 16, 1024: 8}
LINK_CHUNK = 8
"""Nodes that all nodes of a tree are compared with at a time, by slots of the tree; and where links
are all, which no compiler of Triton 3.6 or 3.7 spills with."""


def append_level(
    pool: Pool,
    frontier: Tensor,
    keep: Tensor,
    children: Children,
    start: int,
    depth: int,
    num_best: int,
) -> Best:
    """See `specctl.kernels.tree_build.append_level`."""
    rows, width, top_k = children.token_ids.shape
    require_at_most("append_level", "candidates of a level", width * top_k, max(LEVEL_WARPS))
    require_at_most("append_level", "num_best", num_best, max(BEST_BLOCKS))
    found = _integers(1, rows, num_best, pool.parent.device)[0]
    best = Best(found, torch.empty(found.shape, device=found.device))
    if not rows:
        return best
    block = _block(LEVEL_WARPS, width * top_k)
    append_kernel[(rows,)](
        *best,
        *pool,
        frontier,
        keep,
        *(None if part is None else part.contiguous() for part in children),
        pool.parent.stride(0),
        *frontier.stride(),
        *keep.stride(),
        start,
        depth,
        width,
        top_k,
        num_best,
        BLOCK_C=block,
        BLOCK_W=_block(BEST_BLOCKS, num_best),
        num_warps=LEVEL_WARPS[block],
    )
    return best


def select_nodes(
    scores: Tensor, num_tokens: int, limit: Tensor | None, min_score: Tensor | None
) -> Tensor:
    """See `specctl.kernels.tree_build.select_nodes`."""
    submitted = _integers(1, len(scores), num_tokens, scores.device)[0]
    columns = {"submitted": submitted} | _choice(scores, limit, min_score)
    _launch("select_nodes", columns, num_tokens, select=True, link=False)
    return submitted


def link_tree(pool: Pool, submitted: Tensor, max_depth: int, positions: Tensor | None) -> BuiltTree:
    """See `specctl.kernels.tree_build.link_tree`."""
    built = _empty(*submitted.shape, submitted.device)
    columns = _outputs(built) | _nodes(pool, max_depth, positions)
    columns |= {"given": submitted.contiguous()}
    _launch("link_tree", columns, submitted.shape[1], select=False, link=True)
    return built


def finish_tree(
    pool: Pool,
    scores: Tensor,
    num_tokens: int,
    max_depth: int,
    limit: Tensor | None,
    min_score: Tensor | None,
    positions: Tensor | None,
) -> BuiltTree:
    """See `specctl.kernels.tree_build.finish_tree`."""
    built = _empty(len(scores), num_tokens, scores.device)
    columns = _outputs(built) | _nodes(pool, max_depth, positions)
    columns |= _choice(scores, limit, min_score)
    _launch("finish_tree", columns, num_tokens, select=True, link=True)
    return built


OUTPUTS = (
    "submitted", "out_token", "out_parent", "out_depth", "out_logp", "out_position", "out_child",
    "out_sibling", "out_valid", "out_count", "out_bits",
)  # fmt: skip
POOL = ("token_ids", "parent", "depth", "draft_logp")
CHOICE = ("scores", "limit", "min_score")
NOTHING: dict[str, Any] = dict.fromkeys((*OUTPUTS, *POOL, *CHOICE, "given", "positions"))
NO_SIZES = dict.fromkeys(TREE_SIZES, 0)


def _launch(op: str, columns: dict[str, Any], num_tokens: int, *, select: bool, link: bool) -> None:
    given = NOTHING | NO_SIZES | columns
    num_scores, rows = given["num_scores"], len(given["submitted"])
    require_at_most(op, "slots of the pool", num_scores, max(POOL_WARPS))
    require_at_most(op, "num_tokens", num_tokens, max(TREE_WARPS))
    if not rows or not num_tokens:
        return
    num_words = -(-num_tokens // WORD_BITS)
    given |= {"num_tokens": num_tokens, "num_words": num_words}
    tree_kernel[(rows,)](**given, **_tuned(num_scores, num_tokens, select=select, link=link))


def _tuned(num_scores: int, num_tokens: int, *, select: bool, link: bool) -> dict[str, Any]:
    """Blocks and warps of a size. Few digits at a time where a pool is wide: all slots are compared
    with all digits at once."""
    block_p, block_n = _block(POOL_WARPS, num_scores), _block(TREE_WARPS, num_tokens)
    warps = max(POOL_WARPS[block_p], TREE_WARPS[block_n]) if select else LINK_WARPS[block_n]
    return {
        "SELECT": select,
        "LINK": link,
        "RADIX_BITS": 2 if block_p > 1024 else 4,
        "BLOCK_P": block_p,
        "BLOCK_N": block_n,
        "BLOCK_WORDS": min(block_n // WORD_BITS, 8),
        "CHUNK": CHUNKS[block_n] if select else LINK_CHUNK,
        "num_warps": warps,
    }


def _outputs(built: BuiltTree) -> dict[str, Any]:
    return dict(zip(OUTPUTS, built, strict=True))


def _nodes(pool: Pool, max_depth: int, positions: Tensor | None) -> dict[str, Any]:
    return {
        **{name: getattr(pool, name) for name in POOL},
        "pool_row": pool.parent.stride(0),
        "max_depth": max_depth,
        "positions": None if positions is None else positions.contiguous(),
    }


def _choice(scores: Tensor, limit: Tensor | None, min_score: Tensor | None) -> dict[str, Any]:
    dense = scores if scores.stride(1) == 1 else scores.contiguous()
    return {
        "scores": dense,
        "scores_row": dense.stride(0),
        "num_scores": dense.shape[1],
        "limit": None if limit is None else limit.contiguous(),
        "min_score": min_score,
    }


def _empty(rows: int, num_tokens: int, device: torch.device) -> BuiltTree:
    index, token, parent, depth, position, child, sibling = _integers(7, rows, num_tokens, device)
    words = -(-num_tokens // WORD_BITS)
    return BuiltTree(
        submitted=index,
        token_ids=token,
        parent=parent,
        depth=depth,
        draft_logp=torch.empty(rows, num_tokens, device=device),
        position_ids=position,
        first_child=child,
        next_sibling=sibling,
        valid=torch.empty(rows, num_tokens, dtype=torch.bool, device=device),
        num_nodes=torch.empty(rows, dtype=torch.int64, device=device),
        ancestor_bits=torch.empty(rows, num_tokens, words, dtype=torch.int32, device=device),
    )


def _integers(count: int, rows: int, columns: int, device: torch.device) -> list[Tensor]:
    shape = (rows, columns)
    return [torch.empty(shape, dtype=torch.int64, device=device) for _ in range(count)]


def _block(sizes: Any, size: int) -> int:
    return next(block for block in sizes if block >= size)


# --------------------------------------------------------------------------- machine code

_COLUMNS = {
    "token_ids": "*i64", "parent": "*i64", "depth": "*i64", "draft_logp": "*fp32",
    "joint_logp": "*fp32", "entropy": "*fp32", "topk_entropy": "*fp32", "sibling_rank": "*i64",
    "expanded": "*i1", "path_entropy": "*fp32",
}  # fmt: skip
_LEVEL = _COLUMNS | {
    "best_index": "*i64", "best_logp": "*fp32", "frontier": "*i64", "keep": "*i1",
    "child_ids": "*i64", "child_logp": "*fp32", "child_entropy": "*fp32",
    "child_topk_entropy": "*fp32", "known": "*i1",
}  # fmt: skip
_TREE = _COLUMNS | dict.fromkeys(OUTPUTS, "*i64") | {
    "out_logp": "*fp32", "out_valid": "*i1", "out_bits": "*i32", "scores": "*fp32",
    "limit": "*i64", "min_score": "*fp32", "given": "*i64", "positions": "*i64",
}  # fmt: skip


def _level_case(block: int, best: int, max_registers: int, *, known: bool) -> Case:
    constexprs = {"BLOCK_C": block, "BLOCK_W": best} | ({} if known else {"known": None})
    name = f"append_level, {block} candidates" + (", some unknown" if known else "")
    types = _LEVEL | dict.fromkeys(LEVEL_SIZES, "i32")
    return case_of(name, append_kernel, types, max_registers, LEVEL_WARPS[block], **constexprs)


def _tree_case(slots: int, tokens: int, max_registers: int, absent: tuple[str, ...] = ()) -> Case:
    """`absent` arguments are None: a choice alone has no outputs of links, and the reverse."""
    link, select = "out_bits" not in absent, "scores" not in absent
    constexprs = _tuned(slots, tokens, select=select, link=link)
    warps = constexprs.pop("num_warps")
    name = "finish_tree" if link and select else "link_tree" if link else "select_nodes"
    name += f", {slots} slots, {tokens} tokens" + (", plain" if "limit" in absent else "")
    types = _TREE | dict.fromkeys(TREE_SIZES, "i32")
    constexprs |= dict.fromkeys(absent)
    return case_of(name, tree_kernel, types, max_registers, warps, **constexprs)


_PLAIN = ("limit", "min_score", "given")
_NO_LINKS = ("given", "positions", *OUTPUTS[1:], *POOL)
AOT_CASES: tuple[Case, ...] = (
    _level_case(16, 16, 48, known=False),
    _level_case(128, 16, 48, known=False),
    _level_case(256, 16, 48, known=True),
    _level_case(1024, 64, 96, known=False),
    _tree_case(512, 64, 136, _PLAIN),
    _tree_case(1024, 256, 136, ("given",)),
    _tree_case(4096, 1024, 128, ("given",)),
    _tree_case(1024, 64, 128, _NO_LINKS),
    _tree_case(1, 64, 56, CHOICE),
    _tree_case(1, 256, 168, CHOICE),
    _tree_case(1, 1024, 128, CHOICE),
)
"""Rows are not read 16 bytes at a time: levels begin anywhere in a row, and rows anywhere in
memory."""
