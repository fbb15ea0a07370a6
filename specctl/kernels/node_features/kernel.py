"""The two kernels of `node_features`; `fused.py` says how they share the work."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (arguments are pointers and constants)

from __future__ import annotations

import triton
import triton.language as tl

from specctl.kernels.node_features.keys import place_of, sort_keys, value_of
from specctl.kernels.online import LOWEST, weights_of


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def scan_kernel(
    logits,
    row_stride,
    vocab_size,
    leaf_max,
    node_max,
    parts,
    num_splits,
    num_rows,
    BLOCK: tl.constexpr,
    NODE: tl.constexpr,
    LEAF: tl.constexpr,
):
    """One split of one row; places behind the vocabulary hold -inf."""
    leaves: tl.constexpr = BLOCK // LEAF
    nodes: tl.constexpr = BLOCK // NODE
    program = tl.program_id(0)
    row, split = program // num_splits, program % num_splits
    place = split * BLOCK + tl.arange(0, leaves)[:, None] * LEAF + tl.arange(0, LEAF)[None, :]
    here = logits + row.to(tl.int64) * row_stride
    x = tl.load(here + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32)
    leaf = tl.max(x, 1)
    node = tl.max(tl.reshape(leaf, [nodes, NODE // LEAF]), 1)
    tl.store(leaf_max + program * leaves + tl.arange(0, leaves), leaf)
    tl.store(node_max + program * nodes + tl.arange(0, nodes), node)
    best = tl.maximum(tl.max(node, 0), LOWEST)
    shifted = x - best
    weights = tl.exp(shifted)
    means = tl.maximum(shifted, LOWEST) * weights
    size = num_rows * num_splits
    tl.store(parts + program, best)
    tl.store(parts + size + program, tl.sum(tl.sum(weights, 1), 0))
    tl.store(parts + 2 * size + program, tl.sum(tl.sum(means, 1), 0))


@triton.jit(do_not_specialize=["num_splits", "num_nodes", "num_rows"])
def merge_kernel(
    logits,
    row_stride,
    vocab_size,
    leaf_max,
    node_max,
    parts,
    ids,
    logp,
    top_two,
    scalars,
    num_splits,
    num_nodes,
    num_rows,
    TOP_K: tl.constexpr,
    ENTROPY_TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    LEAVES: tl.constexpr,
    LEAF: tl.constexpr,
):
    """One row: down from its nodes to its best logits, and its sums."""
    row = tl.program_id(0)
    node = _best_children(tl.arange(0, 1), node_max + row * num_nodes, num_nodes, SLOTS, WIDTH)
    first_leaf, num_leaves = row * num_nodes * LEAVES, num_nodes * LEAVES
    leaf = _best_children(node, leaf_max + first_leaf, num_leaves, LEAVES, WIDTH)
    leaf = tl.sort(leaf)  # so that the order of candidates is that of token ids
    here = logits + row.to(tl.int64) * row_stride
    keys = _best_keys(leaf, here, vocab_size, LEAF, WIDTH)
    place, z = place_of(keys), value_of(keys, logits.dtype.element_ty)
    is_mine = (place // LEAF)[:, None] == tl.arange(0, WIDTH)[None, :]
    token = tl.sum(tl.where(is_mine, leaf[None, :], 0), 1) * LEAF + place % LEAF

    top, total, mean = _row_sums(parts + row * num_splits, num_splits, num_rows * num_splits, PARTS)
    # NaN wherever the row holds one, which the maxima may have passed over.
    poison = total - total
    log_total = tl.log(total)
    rank = tl.arange(0, WIDTH)
    tl.store(ids + row * TOP_K + rank, token.to(tl.int64), mask=rank < TOP_K)
    tl.store(logp + row * TOP_K + rank, z - top - log_total, mask=rank < TOP_K)
    z += poison
    tl.store(top_two + row * 2 + rank, z, mask=rank < 2)
    tl.store(scalars + row, log_total - mean / total)
    tl.store(scalars + num_rows + row, _entropy_of(z, top, ENTROPY_TOP_K, WIDTH))
    tl.store(scalars + 2 * num_rows + row, top + log_total)


@triton.jit
def _best_children(parents, table, size, FAN: tl.constexpr, WIDTH: tl.constexpr):
    """Places in a table of maxima: the `WIDTH` largest among the `FAN` children of parents."""
    child = tl.ravel(parents[:, None] * FAN + tl.arange(0, FAN)[None, :])
    values = tl.load(table + child, mask=child < size, other=float("-inf"))
    return place_of(tl.topk(sort_keys(values, child), WIDTH))


@triton.jit
def _best_keys(leaf, logits, vocab_size, LEAF: tl.constexpr, WIDTH: tl.constexpr):
    """Keys of the `WIDTH` best logits of leaves, by their place among these leaves' logits."""
    place = tl.ravel(leaf[:, None] * LEAF + tl.arange(0, LEAF)[None, :])
    values = tl.load(logits + place, mask=place < vocab_size, other=float("-inf"))
    return tl.topk(sort_keys(values, tl.arange(0, WIDTH * LEAF)), WIDTH)


@triton.jit
def _row_sums(parts, num_splits, size, PARTS: tl.constexpr):
    """Maximum, sum and mean (times the sum) of a row's exponentials."""
    split = tl.arange(0, PARTS)
    is_split = split < num_splits
    best = tl.load(parts + split, mask=is_split, other=LOWEST)
    sums = tl.load(parts + size + split, mask=is_split, other=0.0)
    means = tl.load(parts + 2 * size + split, mask=is_split, other=0.0)
    top, weights = weights_of(best)
    means = means + sums * (best - top)
    return top, tl.sum(sums * weights, 0), tl.sum(means * weights, 0)


@triton.jit
def _entropy_of(z, top, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Of the first `COUNT` logits, renormalised."""
    shifted = tl.where(tl.arange(0, WIDTH) < COUNT, z - top, float("-inf"))
    weights = tl.exp(shifted)
    total = tl.sum(weights, 0)
    return tl.log(total) - tl.sum(tl.maximum(shifted, LOWEST) * weights, 0) / total
