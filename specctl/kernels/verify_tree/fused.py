"""Triton kernel of `verify_tree`: one program a tree, one reduction a step.

The children that may be followed are decided for all nodes at once, before the walk: every node
gets a key, lower where its parent prefers it, even where it may be entered. A step of the walk is
then the least key among the current node's children, whatever the acceptance, and only nodes of the
path are visited: typically 3 to 5 of up to 64 levels.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specctl.kernels.checks import block_of, require_at_most
from specctl.kernels.verify_tree import Acceptance, Judged, RunnerUp, Walk

MAX_NODES, MAX_DEPTH = 1024, 64
WARPS: dict[int, int] = {64: 1, 256: 2, 1024: 4}
"""By slots. One warp reduces in registers; more go through shared memory at every step."""
SIZES = [
    "num_slots", "max_depth", "vocab_size", "ids_stride", "bound_stride", "filtered_row",
    "filtered_token",
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
    filtered, node_at, filtered_row, filtered_token,
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
    if filtered is not None:
        place = tl.load(node_at + parent_at, mask=opens, other=0)
        at = filtered + place * filtered_row + second * filtered_token
        opens &= tl.load(at, mask=opens, other=0.0).to(tl.float32) > float("-inf")
    return tl.where(token == wanted, 0, tl.where(token == first, 1, tl.where(opens, 2, 3)))


@triton.jit(do_not_specialize=SIZES)
def walk_kernel(
    path, tokens,
    parent, token_ids, target_ids,
    admitted,
    top_ids, top_logits, greedy, bound, denied, filtered, node_at,
    num_slots, max_depth, vocab_size, ids_stride, bound_stride, filtered_row, filtered_token,
    IS_RATIO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_N)
    exists = slots < num_slots
    base = row * num_slots
    up = tl.load(parent + base + slots, mask=exists, other=-2).to(tl.int32)
    is_child = up >= 0
    link = tl.maximum(up, 0)
    # --- rank of each node among its siblings; the rest of the kernel knows no acceptance
    if admitted is not None:
        enters = tl.load(admitted + base + slots, mask=is_child, other=0) != 0
        rank = tl.where(enters, 0, 1)
    else:
        token = tl.load(token_ids + base + slots, mask=is_child, other=-1)
        wanted = tl.load(target_ids + base + link, mask=is_child, other=-2)
        enters = token == wanted
        rank = tl.where(enters, 0, 1)
        if top_ids is not None:
            rank = _runner_up_ranks(
                token, wanted, base + link, is_child, row,
                top_ids, ids_stride, top_logits, greedy, bound, bound_stride, denied, vocab_size,
                filtered, node_at, filtered_row, filtered_token, IS_RATIO,
            )  # fmt: skip
            enters = (rank == 0) | (rank == 2)
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
    # --- results
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


def verify_tree(parent: Tensor, admitted: Tensor, max_depth: int) -> Tensor:
    path = parent.new_empty(len(parent), max_depth + 1)
    _launch("verify_tree", (path, None), (parent, None, None), max_depth, Judged(admitted))
    return path


def walk_tree(
    parent: Tensor,
    token_ids: Tensor,
    target_ids: Tensor,
    max_depth: int,
    acceptance: Acceptance | None,
) -> Walk:
    size = (len(parent), max_depth + 1)
    found = Walk(parent.new_empty(size), parent.new_empty(size))
    _launch("walk_tree", found, (parent, token_ids, target_ids), max_depth, acceptance)
    return found


def _launch(
    op: str,
    outputs: tuple[Tensor, Tensor | None],
    tree: tuple[Tensor, Tensor | None, Tensor | None],
    max_depth: int,
    acceptance: Acceptance | None,
) -> None:
    num_rows, num_slots = tree[0].shape
    require_at_most(op, "slots of a tree", num_slots, MAX_NODES)
    require_at_most(op, "levels", max_depth, MAX_DEPTH)
    if not num_rows:
        return
    given: dict[str, Any] = dict.fromkeys(
        ("admitted", "top_ids", "top_logits", "greedy", "bound", "denied", "filtered", "node_at")
    )
    given |= dict.fromkeys(SIZES, 0) | {"IS_RATIO": False}
    if isinstance(acceptance, Judged):
        given["admitted"] = acceptance.admitted.contiguous()
    elif isinstance(acceptance, RunnerUp):
        given |= _runner_up(acceptance)
    block = block_of(WARPS, num_slots)
    given |= {"num_slots": num_slots, "max_depth": max_depth}
    walk_kernel[(num_rows,)](
        *outputs, *(None if part is None else part.contiguous() for part in tree), **given,
        BLOCK_N=block, BLOCK_D=16 if max_depth < 16 else 128, num_warps=WARPS[block],
    )  # fmt: skip


def _runner_up(given: RunnerUp) -> dict[str, Any]:
    ids = given.top_ids
    row, node, own = ids.stride()
    if own != 1 or row != ids.shape[1] * node:  # the first two of top-k need no copy
        ids = ids.contiguous()
    found = {
        "top_ids": ids, "ids_stride": ids.stride(1), "top_logits": given.top_logits.contiguous(),
        "greedy": given.greedy.contiguous(),
        "bound": given.bound, "bound_stride": given.bound.stride(0),
        "IS_RATIO": given.form == "ratio",
    }  # fmt: skip
    if given.denied is not None and len(given.denied):
        found |= {"denied": given.denied.contiguous(), "vocab_size": len(given.denied)}
    if given.filtered is not None and given.node_at is not None:
        row, token = given.filtered.stride()
        found |= {"filtered": given.filtered, "node_at": given.node_at.contiguous()}
        found |= {"filtered_row": row, "filtered_token": token}
    return found
