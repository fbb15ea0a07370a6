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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.checks import FLOATS, ceil_div, dense_rows, refuse, require_at_most
from specctl.kernels.ordering import LOWEST, place_of, sort_keys, value_of

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


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def scan_kernel(
    logits, row_stride, vocab_size, leaf_max, node_max, parts, num_splits, num_rows, BLOCK:
    tl.constexpr, NODE: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
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
    logits, row_stride, vocab_size, leaf_max, node_max, parts, ids, logp, top_two, scalars,
    num_splits, num_nodes, num_rows, TOP_K: tl.constexpr, ENTROPY_TOP_K: tl.constexpr, WIDTH:
    tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, LEAVES: tl.constexpr, LEAF:
    tl.constexpr,
):  # fmt: skip
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
    top = tl.max(best, 0)
    weights = tl.exp(best - top)
    means = means + sums * (best - top)
    return top, tl.sum(sums * weights, 0), tl.sum(means * weights, 0)


@triton.jit
def _entropy_of(z, top, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Of the first `COUNT` logits, renormalised."""
    shifted = tl.where(tl.arange(0, WIDTH) < COUNT, z - top, float("-inf"))
    weights = tl.exp(shifted)
    total = tl.sum(weights, 0)
    return tl.log(total) - tl.sum(tl.maximum(shifted, LOWEST) * weights, 0) / total


class Config(NamedTuple):
    """The cut of a call, chosen by its number of rows and the vocabulary."""

    scan_block: int  # logits of a split
    node: int  # logits of a node
    num_slots: int  # of a row's nodes, a power of two
    num_parts: int  # splits of a row that the merge has room for, likewise
    merge_warps: int  # few rows wait for one another's latency, many for the issue of instructions


def config_of(num_rows: int, vocab_size: int, width: int) -> Config:
    """The tuned cut; only `scan_block` and `merge_warps` depend on the rows.

    Args:
        width: K, a power of two.
    """
    filling = [b for b in BLOCKS if num_rows * ceil_div(vocab_size, b) >= MIN_PROGRAMS]
    node = next(node for limit, node in NODES if vocab_size <= limit)
    return Config(
        scan_block=max(filling[0] if filling else BLOCKS[-1], node),
        node=node,
        num_slots=max(width, triton.next_power_of_2(ceil_div(vocab_size, node))),
        num_parts=triton.next_power_of_2(ceil_div(vocab_size, max(BLOCKS[-1], node))),
        merge_warps=8 if num_rows < MIN_PROGRAMS else 4,
    )


def node_features(logits: Tensor, top_k: int, entropy_top_k: int) -> tuple[Tensor, ...]:
    """Two launches, no synchronisation."""
    *shape, vocab_size = logits.shape
    entropy_top_k = min(entropy_top_k, vocab_size)
    num_rows, num_best = math.prod(shape), max(top_k, entropy_top_k)
    if logits.dtype not in FLOATS:
        problem = f"logits must be float32, float16 or bfloat16, not {logits.dtype}"
        refuse(OP, problem, "convert them")
    require_at_most(OP, "top_k", num_best, MAX_TOP_K)
    require_at_most(OP, "vocabulary", vocab_size, MAX_VOCAB)
    num_leaves = num_rows * ceil_div(vocab_size, BLOCKS[0]) * BLOCKS[0] // LEAF
    require_at_most(OP, "leaves of 32 logits", num_leaves, MAX_LEAVES)
    x = dense_rows(logits.reshape(-1, vocab_size))
    ids = torch.empty(num_rows, top_k, dtype=torch.int64, device=x.device)
    logp = torch.empty(num_rows, top_k, device=x.device)
    top_two = torch.empty(num_rows, 2, device=x.device)
    scalars = torch.empty(3, num_rows, device=x.device)
    entropy, topk_entropy, log_sum_exp = (s.view(shape) for s in scalars)
    found = (ids.view(*shape, top_k), logp.view(*shape, top_k), entropy, topk_entropy, log_sum_exp)
    if not num_rows:
        return (*found, top_two.view(*shape, 2))
    width = triton.next_power_of_2(max(num_best, 2))
    config = config_of(num_rows, vocab_size, width)
    block, node = config.scan_block, config.node
    num_splits = ceil_div(vocab_size, block)
    num_programs = num_rows * num_splits
    parts = torch.empty(3, num_rows, num_splits, device=x.device)
    node_max, leaf_max = (x.new_empty(num_programs * block // size) for size in (node, LEAF))
    inputs = (x, x.stride(0), vocab_size, leaf_max, node_max, parts)
    scan_kernel[(num_programs,)](
        *inputs, num_splits, num_rows, BLOCK=block, NODE=node, LEAF=LEAF, num_warps=4
    )
    merge_kernel[(num_rows,)](
        *inputs, ids, logp, top_two, scalars, num_splits, num_splits * block // node, num_rows,
        TOP_K=top_k, ENTROPY_TOP_K=entropy_top_k, WIDTH=width, SLOTS=config.num_slots,
        PARTS=config.num_parts, LEAVES=node // LEAF, LEAF=LEAF, num_warps=config.merge_warps,
    )  # fmt: skip
    return (*found, top_two.view(*shape, 2))


def best_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    _, logp, entropy, *_ = node_features(logits, 1, 1)
    return logp[..., 0], entropy
