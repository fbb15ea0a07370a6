"""Triton kernels of `bookkeeping`, one launch an op.

Nothing here is worth reading twice or sharing, so the chain of loads that wait for one another
counts: independent loads are issued at once. The grids depend on capacities alone, so that a graph
holds them whatever a round brings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.bookkeeping import FACTS, Laid, Opened, Settled, Walked
from specctl.kernels.checks import block_of, ceil_div, dense_rows, require_at_most
from specctl.kernels.tree_build import WORD_BITS, BuiltTree
from specctl.tree import PAD as _PAD
from specctl.tree import ROOT as _ROOT
from specctl.tree import DraftPool

ROOT, PAD = tl.constexpr(_ROOT), tl.constexpr(_PAD)
POOL_BLOCK, POOL_WARPS = 1024, 4
LEVEL_BLOCK, LEVEL_WORDS, LEVEL_WARPS = 16, 8, 1
"""Nodes and words of a program; one warp, so that it waits for no other."""
NODE_BLOCK = 64
LAY_WARPS: dict[int, int] = {2: 2, 8: 2, 32: 4}
"""By words of 32 nodes: trees of up to 64, 256 and 1,024."""
ROW_BLOCKS = (64, 1024)
"""Rows that a program adds up."""
STEP_BLOCKS = (16, 128)
SETTLE_BLOCK, SETTLE_WARPS = 1024, 8
"""Slots of the pool at a time: all of them in one step but for the largest pools."""
ROOT_SIZES = ["pool_row", "opened_row", "num_slots"]
LEVEL_SIZES = [
    "pool_row", "slots_row", "slots_node", "keep_row", "keep_node", "above_row", "above_node",
    "opened_row", "words_row", "words_node",
    "start", "top_k", "level", "behind", "width", "num_words",
]  # fmt: skip
LAY_SIZES = ["num_rows", "num_columns", "num_words", "num_tokens", "last_place"]
SETTLE_SIZES = [
    "outcome_row", "settled_row", "path_row", "token_row", "node_row", "parent_row", "depth_row",
    "submitted_row", "best_step",
    "num_steps", "num_columns", "num_tokens", "num_slots", "num_submitted", "num_longest",
]  # fmt: skip
"""A size that happens to be 1 or a multiple of 16 must not compile a kernel again mid-request."""


@triton.jit(do_not_specialize=ROOT_SIZES)
def open_tree_kernel(
    token_ids, parent, depth, draft_logp, joint_logp, entropy, topk_entropy,
    sibling_rank, expanded, path_entropy,
    out_slots, out_keep,
    root_ids, vacant,
    pool_row, opened_row, num_slots,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = row * pool_row
    slots = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    here, is_root = slots < num_slots, slots == 0
    token, is_vacant = tl.load(root_ids + row), tl.load(vacant + row) != 0
    tl.store(parent + base + slots, tl.where(is_root, ROOT, PAD), mask=here)
    tl.store(joint_logp + base + slots, tl.where(is_root, 0.0, float("-inf")), mask=here)
    if tl.program_id(1) == 0:
        tl.store(token_ids + base, token)
        tl.store(depth + base, 0)
        tl.store(sibling_rank + base, 0)
        tl.store(draft_logp + base, 0.0)
        tl.store(entropy + base, 0.0)
        tl.store(topk_entropy + base, 0.0)
        tl.store(path_entropy + base, 0.0)
        tl.store(expanded + base, 0)
        tl.store(out_slots + row * opened_row, 0)
        tl.store(out_keep + row * opened_row, is_vacant == 0)


@triton.jit(do_not_specialize=LEVEL_SIZES)
def open_level_kernel(
    out_slots, out_keep, out_token, out_parent, out_position, out_place, out_words,
    token_ids, slots, keep, vacant, stable, above,
    pool_row, slots_row, slots_node, keep_row, keep_node, above_row, above_node,
    opened_row, words_row, words_node,
    start, top_k, level, behind, width, num_words,
    BLOCK_W: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    nodes = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    here = nodes < width
    slot = tl.load(slots + row * slots_row + nodes * slots_node, mask=here, other=0)
    kept = tl.load(keep + row * keep_row + nodes * keep_node, mask=here, other=0) != 0
    is_vacant = tl.load(vacant + row) != 0
    read = tl.load(stable + row)
    # --- what the slots say
    token = tl.load(token_ids + row * pool_row + slot, mask=here, other=0)
    column = tl.zeros_like(nodes)
    if above is not None:
        column = (slot.to(tl.int32) - start) // top_k
    entry = behind + nodes
    bit, word = 1 << (entry & 31), entry >> 5
    for first in range(0, num_words, BLOCK_WORDS):
        words = (first + tl.arange(0, BLOCK_WORDS))[None, :]
        mask = here[:, None] & (words < num_words)
        seen = tl.where(word[:, None] == words, bit[:, None], 0)
        if above is not None:
            those = above + row * above_row + column[:, None] * above_node + words
            seen = seen | tl.load(those, mask=mask, other=0)
        at = row * words_row + nodes[:, None] * words_node + words
        tl.store(out_words + at, seen, mask=mask)
    # ---
    at = row * opened_row + nodes
    tl.store(out_slots + at, slot, mask=here)
    tl.store(out_keep + at, kept & (is_vacant == 0), mask=here)
    tl.store(out_token + at, token, mask=here)
    tl.store(out_parent + at, column.to(tl.int64), mask=here)
    tl.store(out_position + at, tl.zeros_like(slot) + (read + level - 1), mask=here)
    tl.store(out_place + at, read + entry, mask=here)


@triton.jit(do_not_specialize=LAY_SIZES)
def lay_out_kernel(
    offsets, out_row, out_place, out_token, out_position, out_positions, out_words, node_at,
    token_ids, position_ids, depth, bits, num_nodes, prefix, positions,
    num_rows, num_columns, num_words, num_tokens, last_place,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """The first programs lay blocks of rows, the others fill the rest of the axis.

    Each adds up the rows before its own by itself: no search, and no waiting. The loads of a
    program of the second kind are masked, hence 0, which it writes.
    """
    program, steps = tl.program_id(0), tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(num_columns, BLOCK_N)
    row = (program // blocks).to(tl.int64)
    is_tree = row < num_rows
    nodes = program % blocks * BLOCK_N + steps
    in_row = is_tree & (nodes < num_columns)
    source = row * num_columns + nodes
    words = tl.arange(0, BLOCK_WORDS)[None, :]
    in_words = words < num_words
    # --- all loads
    rows = tl.arange(0, BLOCK_B)
    sizes = tl.load(num_nodes + rows, mask=rows < num_rows, other=0)
    size = tl.load(num_nodes + row, mask=is_tree, other=0)
    place = tl.load(prefix + row, mask=is_tree, other=0)
    output = tl.load(positions + row, mask=is_tree, other=0)
    level = tl.load(depth + source, mask=in_row, other=0)
    token = tl.load(token_ids + source, mask=in_row, other=0)
    position = tl.load(position_ids + source, mask=in_row, other=0)
    seen = bits + source[:, None] * num_words + words
    seen = tl.load(seen, mask=in_row[:, None] & in_words, other=0)
    # --- where to
    before = tl.sum(tl.where(rows < row, sizes, 0), 0)  # of all rows, where there is no tree
    left = (program - num_rows * blocks) * BLOCK_N + steps
    at = tl.where(is_tree, before + nodes, left)
    own = tl.where(is_tree, in_row & (nodes < size), at >= before)
    here = own & (at < num_tokens)
    is_first = is_tree & (program % blocks == 0)
    tl.store(offsets + row, before, mask=is_first)
    tl.store(offsets + num_rows, before + size, mask=is_first & (row == num_rows - 1))
    tl.store(node_at + source, tl.minimum(at, num_tokens - 1), mask=in_row)
    # --- the axis
    tl.store(out_row + at, tl.zeros_like(at) + tl.where(is_tree, row, 0), mask=here)
    tl.store(out_place + at, tl.where(is_tree, place + nodes, last_place), mask=here)
    tl.store(out_token + at, token, mask=here)
    tl.store(out_position + at, position, mask=here)
    tl.store(out_positions + at, output + level, mask=here)
    there = out_words + at[:, None] * num_words + words
    tl.store(there, seen, mask=here[:, None] & in_words)


@triton.jit(do_not_specialize=SETTLE_SIZES)
def settle_kernel(
    outcome, out_path, path_at, read_ids, read_place, last, next_root,
    path, token_ids, num_nodes, node_at, best, parent, depth, submitted, faulty, stable,
    outcome_row, settled_row, path_row, token_row, node_row, parent_row, depth_row,
    submitted_row, best_step,
    num_steps, num_columns, num_tokens, num_slots, num_submitted, num_longest,
    NUM_FACTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, BLOCK_D)
    in_path = steps < num_steps
    node = tl.load(path + row * path_row + steps, mask=in_path, other=-1)
    token = tl.load(token_ids + row * token_row + steps, mask=in_path, other=-1)
    nodes, first_at = tl.load(num_nodes + row), tl.load(node_at + row * node_row)
    read, fault = tl.load(stable + row), tl.load(faulty + row) != 0
    place = tl.load(node_at + row * node_row + tl.maximum(node, 0), mask=in_path, other=0)
    # --- pool, selection and logits side by side, so that their loads wait for nothing
    deepest = tl.zeros((BLOCK,), tl.int64)
    submitted_count = tl.zeros((BLOCK,), tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_longest, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        in_pool = slots < num_slots
        up = tl.load(parent + row * parent_row + slots, mask=in_pool, other=PAD)
        level = tl.load(depth + row * depth_row + slots, mask=in_pool, other=0)
        wanted = tl.load(
            submitted + row * submitted_row + slots, mask=slots < num_submitted, other=-1
        )
        at = tl.minimum(first_at + slots, num_tokens - 1)
        verified = (slots < nodes) & (slots < num_columns)
        logit = tl.load(best + at * best_step, mask=verified, other=0.0).to(tl.float32)
        deepest = tl.maximum(deepest, tl.where(up > PAD, level, 0))
        submitted_count += (wanted >= 0).to(tl.int32)
        broken = broken | tl.where(tl.abs(logit) < float("inf"), 0, 1)
    # --- facts
    count = tl.sum((node >= 0).to(tl.int64), 0)
    facts = outcome + row * outcome_row
    tl.store(facts, count)
    tl.store(facts + 1, nodes)
    tl.store(facts + 2, tl.max(deepest, 0))
    tl.store(facts + 3, fault.to(tl.int64))
    tl.store(facts + 4, (tl.max(broken, 0) == 0).to(tl.int64))
    tl.store(facts + 5, tl.sum(submitted_count, 0).to(tl.int64))
    tl.store(facts + NUM_FACTS + steps, token, mask=in_path)
    # --- what comes behind
    out = row * settled_row + steps
    clean = tl.maximum(token, 0)
    tl.store(out_path + out, node, mask=in_path)
    tl.store(path_at + out, place, mask=in_path)
    tl.store(read_ids + out, clean, mask=in_path)
    tl.store(read_place + out, read + steps, mask=in_path)
    end = tl.maximum(count - 1, 0)
    tl.store(last + row, end)
    tl.store(next_root + row, tl.sum(tl.where(steps == end, clean, 0), 0))


def open_tree(pool: DraftPool, root_ids: Tensor, vacant: Tensor, opened: Opened) -> None:
    rows, size = pool.parent.shape
    if rows:
        open_tree_kernel[(rows, ceil_div(size, POOL_BLOCK))](
            *pool[:-1], opened.slots, opened.keep, root_ids.contiguous(), vacant.contiguous(),
            pool.parent.stride(0), opened.slots.stride(0), size,
            BLOCK_P=POOL_BLOCK, num_warps=POOL_WARPS,
        )  # fmt: skip


def open_level(
    pool: DraftPool, slots: Tensor, keep: Tensor, vacant: Tensor, stable: Tensor,
    above: Tensor | None, opened: Opened, start: int, top_k: int, depth: int, behind: int,
) -> None:  # fmt: skip
    (rows, width), num_words = slots.shape, opened.words.shape[2]
    above = None if above is None or depth == 1 else dense_rows(above)
    strides = (
        pool.parent.stride(0), *slots.stride(), *keep.stride(),
        *((0, 0) if above is None else above.stride()[:2]),
        opened.slots.stride(0), *opened.words.stride()[:2],
    )  # fmt: skip
    if slots.numel():
        open_level_kernel[(rows, ceil_div(width, LEVEL_BLOCK))](
            *opened, pool.token_ids, slots, keep, vacant.contiguous(), stable.contiguous(), above,
            *strides, start, top_k, depth, behind, width, num_words,
            BLOCK_W=LEVEL_BLOCK, BLOCK_WORDS=LEVEL_WORDS, num_warps=LEVEL_WARPS,
        )  # fmt: skip


def lay_out(
    tree: BuiltTree, prefix: Tensor, positions: Tensor, num_tokens: int, last_place: int
) -> Laid:
    rows, columns, num_words = tree.ancestor_bits.shape
    require_at_most("lay_out", "nodes of a tree", columns, WORD_BITS * max(LAY_WARPS))
    column = tree.parent.new_empty
    laid = Laid(
        column(rows + 1),
        *(column(num_tokens) for _ in range(5)),
        column(num_tokens, num_words, dtype=torch.int32),
        column(rows, columns),
    )
    given = (tree.token_ids, tree.position_ids, tree.depth, tree.ancestor_bits, tree.num_nodes)
    block = block_of(LAY_WARPS, num_words)
    programs = rows * ceil_div(columns, NODE_BLOCK) + ceil_div(num_tokens, NODE_BLOCK)
    lay_out_kernel[(programs,)](
        *laid, *(tensor.contiguous() for tensor in (*given, prefix, positions)),
        rows, columns, num_words, num_tokens, last_place,
        BLOCK_B=block_of(ROW_BLOCKS, rows), BLOCK_N=NODE_BLOCK, BLOCK_WORDS=block,
        num_warps=LAY_WARPS[block],
    )  # fmt: skip
    return laid


def settle(found: Walked, settled: Settled) -> None:
    rows, steps = found.path.shape
    require_at_most("settle", "nodes of a path", steps, max(STEP_BLOCKS))
    if not rows:
        return
    tables = ("path", "token_ids", "node_at", "parent", "depth", "submitted")
    columns = ("num_nodes", "faulty", "stable")
    given = found._replace(
        **{name: dense_rows(getattr(found, name)) for name in tables},
        **{name: getattr(found, name).contiguous() for name in columns},
    )
    num_columns, num_slots = found.node_at.shape[1], found.parent.shape[1]
    num_submitted = found.submitted.shape[1]
    settle_kernel[(rows,)](
        *settled, *given,
        settled.outcome.stride(0), settled.path.stride(0),
        *(getattr(given, name).stride(0) for name in tables), found.best.stride(0),
        steps, num_columns, len(found.best), num_slots, num_submitted,
        max(num_columns, num_slots, num_submitted),
        NUM_FACTS=len(FACTS), BLOCK_D=block_of(STEP_BLOCKS, steps), BLOCK=SETTLE_BLOCK,
        num_warps=SETTLE_WARPS,
    )  # fmt: skip
