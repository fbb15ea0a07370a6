"""The walk in Triton: one program a tree, one reduction a step.

What may follow a node is settled for all nodes at once, before the walk: every node gets a key,
lower for what its parent prefers, even where it may be entered. A step of the walk is then the
least key among the current node's children, whatever the acceptance, and only nodes of the path
are visited: typically 3 to 5 of up to 64 levels.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (arguments are pointers and constants)

from __future__ import annotations

import triton
import triton.language as tl

STRICT, JUDGED, RUNNER_UP, NEAR_LAW = range(4)
_JUDGED, _RUNNER_UP, _NEAR_LAW = (tl.constexpr(law) for law in (JUDGED, RUNNER_UP, NEAR_LAW))
RUNTIME_SIZES = [
    "num_slots", "max_depth", "vocab_size", "ids_stride", "bound_stride", "threshold_stride",
    "law_row", "law_node", "law_token",
]  # fmt: skip
"""A size that happens to be 1 or a multiple of 16 must not compile the kernel again mid-request."""


@triton.jit
def _is_denied(denied, token_ids, vocab_size, mask):
    known = mask & (token_ids >= 0) & (token_ids < vocab_size)
    return tl.load(denied + token_ids, mask=known, other=0) != 0


@triton.jit
def _runner_up_ranks(
    token, wanted, parent_at, is_child, row,
    top_ids, ids_stride, top_logits, greedy, bound, bound_stride, denied, vocab_size,
    law, law_row, law_node, law_token, link,
    IS_RATIO: tl.constexpr,
):  # fmt: skip
    """0 the target's token, 1 v1, 2 v2 where it is near enough, else 3."""
    best_id = tl.load(top_ids + parent_at * ids_stride, mask=is_child, other=-1)
    next_id = tl.load(top_ids + parent_at * ids_stride + 1, mask=is_child, other=-1)
    z1 = tl.load(top_logits + 2 * parent_at, mask=is_child, other=0.0)
    z2 = tl.load(top_logits + 2 * parent_at + 1, mask=is_child, other=0.0)
    first = tl.where(tl.load(greedy + row) != 0, wanted, best_id)
    second = tl.where(best_id == first, next_id, best_id)
    if IS_RATIO:
        both = (z1 > 0) & (z2 > 0)
        # Where it does not count the divisor is 1: 0 / 0 would be NaN, and says so in Python.
        ratio = tl.div_rn(z2, tl.where(both, z1, 1.0))
        closeness = tl.where(both, ratio, float("-inf"))
    else:
        closeness = z2 - z1
    is_second = is_child & (token == second)
    opens = is_second & (closeness > tl.load(bound + row * bound_stride))
    if denied is not None:
        opens &= ~_is_denied(denied, wanted, vocab_size, opens)
        opens &= ~_is_denied(denied, second, vocab_size, opens)
    if law is not None:
        at = law + row * law_row + link.to(tl.int64) * law_node + second * law_token
        opens &= tl.load(at, mask=opens, other=0.0).to(tl.float32) > float("-inf")
    return tl.where(token == wanted, 0, tl.where(token == first, 1, tl.where(opens, 2, 3)))


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def walk_kernel(
    path, tokens, bonus_ids, num_accepted, first_rejected,
    parent, token_ids, target_ids,
    admitted,
    top_ids, ids_stride, top_logits, greedy, bound, bound_stride,
    distance, threshold, threshold_stride,
    denied, vocab_size,
    law, law_row, law_node, law_token,
    num_slots, max_depth,
    LAW: tl.constexpr, IS_RATIO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_N)
    exists = slots < num_slots
    base = row * num_slots
    up = tl.load(parent + base + slots, mask=exists, other=-2).to(tl.int32)
    is_child = up >= 0
    link = tl.maximum(up, 0)
    # --- what each node's parent thinks of it; the rest of the kernel knows no acceptance
    if LAW == _JUDGED:
        enters = tl.load(admitted + base + slots, mask=is_child, other=0) != 0
        rank = tl.where(enters, 0, 1)
    else:
        token = tl.load(token_ids + base + slots, mask=is_child, other=-1)
        wanted = tl.load(target_ids + base + link, mask=is_child, other=-2)
        enters = token == wanted
        rank = tl.where(enters, 0, 1)
        if LAW == _RUNNER_UP:
            rank = _runner_up_ranks(
                token, wanted, base + link, is_child, row,
                top_ids, ids_stride, top_logits, greedy, bound, bound_stride, denied, vocab_size,
                law, law_row, law_node, law_token, link, IS_RATIO,
            )  # fmt: skip
            enters = (rank == 0) | (rank == 2)
        if LAW == _NEAR_LAW:
            # All unmatched siblings have one rank, so the first of them stands for its parent.
            gap = tl.load(distance + base + slots, mask=is_child, other=float("inf"))
            near = gap.to(tl.float64) < tl.load(threshold + row * threshold_stride)
            if denied is not None:
                near &= ~_is_denied(denied, wanted, vocab_size, is_child)
                near &= ~_is_denied(denied, token, vocab_size, is_child)
            enters = enters | near
    key = (rank * BLOCK_N + slots) * 2 + tl.where(enters, 0, 1)
    # --- the walk
    steps = tl.arange(0, BLOCK_D)
    following = tl.full((BLOCK_D,), -1, tl.int32)
    has_root = tl.load(parent + base) == -1
    current = tl.where(has_root, 0, -1)
    count = tl.where(has_root, 0, 0)
    going = has_root & (max_depth > 0)
    while going:
        best = tl.min(tl.where(is_child & (up == current), key, 8 * BLOCK_N + 1), 0)
        going = (best & 1) == 0
        child = (best >> 1) & (BLOCK_N - 1)
        following = tl.where((steps == count) & going, child, following)
        current = tl.where(going, child, current)
        count += going.to(tl.int32)
        going = going & (count < max_depth)
    # --- what was found
    width = max_depth + 1
    inside = steps < width
    tl.store(path + row * width, tl.where(has_root, 0, -1).to(tl.int64))
    tl.store(path + row * width + 1 + steps, following.to(tl.int64), mask=steps < max_depth)
    if token_ids is not None:
        taken = tl.load(token_ids + base + following, mask=following >= 0, other=-1)
        bonus = tl.load(target_ids + base + tl.maximum(current, 0))
        bonus = tl.where(has_root, bonus, -1)
        emitted = tl.where(steps == count, bonus, taken)
        tl.store(tokens + row * width + steps, emitted, mask=inside)
        behind = is_child & (up == current)
        rejected = tl.min(tl.where(behind, slots, BLOCK_N), 0)
        tl.store(bonus_ids + row, bonus)
        tl.store(num_accepted + row, count.to(tl.int64))
        tl.store(first_rejected + row, tl.where(rejected < BLOCK_N, rejected, -1).to(tl.int64))
