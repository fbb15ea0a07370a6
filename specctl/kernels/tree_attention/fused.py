"""Triton twin of `tree_attention`: splits of the keys side by side, then their merge.

A program holds one tile of queries, nodes times the query heads that share a key head, and walks
one split of that request's keys: blocks of the prefix without a mask, then in words of 32 entries
what is left of the prefix, and the tail under its bits. How long a split is follows from lengths
read on the device; the grid follows from capacities alone, so a launch can be captured and
replayed, and nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specctl.kernels.tree_attention.kernel import attend, merge
from specctl.kernels.tree_attention.tiling import (
    MAX_SPLITS,
    Tiles,
    chip_of,
    merge_warps,
    num_splits_for,
    padded_dim,
    tiles_for,
)

LOG2_E = 1.4426950408889634


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prefixes: Tensor,
    offsets: Tensor,
    ancestors: Tensor,
    *,
    scaling: float,
    max_nodes: int,
    behind: int,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """See `specctl.kernels.tree_attention`; `tiles` and `num_splits` are for benchmarks."""
    (num_tokens, heads, dim), key_heads = query.shape, keys.shape[1]
    if tiles is None:
        num_rows, generation = max_nodes * heads // key_heads, chip_of(query.device).generation
        tiles = tiles_for(num_rows, dim, query.dtype, generation)
    grid = _grid(query, keys, max_nodes, tiles, num_splits)
    is_split = grid[1] > 1
    if is_split:
        out = query.new_empty(grid[1], num_tokens, heads, dim, dtype=torch.float32)
        lse = query.new_empty(grid[1], num_tokens, heads, dtype=torch.float32)
    else:  # tokens behind the last request are nobody's to write
        out = lse = query.new_zeros(num_tokens, heads, dim)
    attend[grid](
        query,
        keys,
        values,
        prefixes,
        offsets,
        ancestors,
        out,
        lse,
        scaling * LOG2_E,
        num_tokens,
        ancestors.shape[1],
        behind,
        grid[1],
        *query.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        KEY_ENTRY=keys.stride(2),
        VALUE_ENTRY=values.stride(2),
        KEY_HEADS=key_heads,
        GROUP=heads // key_heads,
        DIM=dim,
        PADDED_DIM=padded_dim(dim),
        QUERIES=tiles.queries,
        ENTRIES=tiles.entries,
        IS_SPLIT=is_split,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return _merged(out, lse, offsets, query.dtype) if is_split else out


def _grid(
    query: Tensor, keys: Tensor, max_nodes: int, tiles: Tiles, num_splits: int | None
) -> tuple[int, int, int]:
    """Tiles of a request, splits, requests times key heads."""
    rows, key_heads, capacity = keys.shape[:3]
    group = query.shape[1] // key_heads
    num_tiles = triton.cdiv(max_nodes * group, tiles.queries)
    if num_splits is None:
        # Of ragged requests few are as large as the largest.
        live = min(rows * num_tiles, rows + len(query) * group // tiles.queries)
        most = min(MAX_SPLITS, triton.cdiv(capacity, tiles.entries))
        num_splits = num_splits_for(live * key_heads, most, chip_of(query.device).num_sms)
    return num_tiles, num_splits, rows * key_heads


def _merged(partial: Tensor, lse: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    num_splits, num_tokens, heads, dim = partial.shape
    out = partial.new_empty(num_tokens, heads, dim, dtype=dtype)
    splits, padded = triton.next_power_of_2(num_splits), padded_dim(dim)
    merge[(num_tokens * heads,)](
        partial,
        lse,
        offsets,
        out,
        num_tokens,
        len(offsets) - 1,
        num_splits,
        HEADS=heads,
        DIM=dim,
        PADDED_DIM=padded,
        SPLITS=splits,
        num_warps=merge_warps(splits, padded),
    )
    return out
