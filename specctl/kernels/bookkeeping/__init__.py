"""`open_tree`, `open_level`, `lay_out`, `settle`: a round's small integers, a launch a step.

As torch operations they would take some forty launches a drafted level and fifty a verification,
which in a captured graph cost more than the policy.

    open_tree    once a round: an empty pool and its root
    open_level   once a level: the nodes that the drafter evaluates next, and their ancestors
    lay_out      once a round: the trees of a batch end to end on the verification's axis
    settle       once a round: the outcome for the host, and the drafter's next reading
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specctl.kernels.checks import (
    FLOATS,
    ceil_div,
    refuse,
    require_at_least,
    require_at_most,
    require_dense,
    require_tensor,
)
from specctl.kernels.dispatch import implementation
from specctl.kernels.tree_build import WORD_BITS, BuiltTree, check_pool
from specctl.tree import DraftPool

MAX_ROWS = 1024
FACTS = ("count", "num_verified", "num_levels", "faulty", "finite", "wanted")
"""Columns of an outcome before its tokens, int64 each."""


class Opened(NamedTuple):
    """The nodes that a drafter evaluates next, buffers `[B, W]` written in place."""

    slots: Tensor  # int64, in the pool
    keep: Tensor  # bool, whether it is expanded
    token_ids: Tensor  # int64
    parent: Tensor  # int64, column in the level before
    position_ids: Tensor  # int64
    place: Tensor  # int64, entry of the row's slot
    words: Tensor  # `[B, W, words]` int32, evaluated nodes visible to each, itself included

    def check(self, op: str, num_rows: int) -> None:
        """Rejects buffers that do not fit the batch."""
        shape: tuple[int | None, ...] = (num_rows, None)
        for name, column in zip(self._fields[:-1], self[:-1], strict=True):
            dtype = torch.bool if name == "keep" else torch.int64
            require_tensor(op, f"opened.{name}", column, shape, dtype)
            require_dense(op, f"opened.{name}", column, self.slots)
            shape = tuple(self.slots.shape)
        require_tensor(op, "opened.words", self.words, (*shape, None), torch.int32)
        require_dense(op, "opened.words", self.words)


class Laid(NamedTuple):
    """T places for the nodes of B trees."""

    offsets: Tensor  # `[B + 1]` int64: where each row's nodes start, and the end of the last
    row: Tensor
    place: Tensor
    token_ids: Tensor
    position_ids: Tensor
    positions: Tensor
    """`row` to `positions`: `[T]` int64; `positions` counts output tokens, `position_ids` text."""
    words: Tensor  # `[T, words]` int32
    node_at: Tensor  # `[B, N]` int64, place of each node on the axis


class Walked(NamedTuple):
    """The results of verifying B trees of N nodes, on T places."""

    path: Tensor
    token_ids: Tensor  # `path`, `token_ids`: `[B, D + 1]` int64, of `walk_tree`
    num_nodes: Tensor  # `[B]` int64
    node_at: Tensor  # `[B, N]` int64
    best: Tensor  # `[T]`, largest logit of each
    parent: Tensor
    depth: Tensor  # `parent`, `depth`: `[B, P]` int64, of the pool
    submitted: Tensor  # `[B, M]` int64, before any cut
    faulty: Tensor  # `[B]` bool
    stable: Tensor  # `[B]` int64

    def check(self, op: str) -> None:
        """Rejects parts that do not fit each other."""
        require_tensor(op, "path", self.path, (None, None), torch.int64)
        rows, steps = self.path.shape
        shapes: dict[str, tuple[int | None, ...]] = {
            "path": (rows, steps),
            "token_ids": (rows, steps),
            "num_nodes": (rows,),
            "node_at": (rows, None),
            "parent": (rows, None),
            "depth": tuple(self.parent.shape),
            "submitted": (rows, None),
            "stable": (rows,),
        }
        for name, shape in shapes.items():
            require_tensor(op, name, getattr(self, name), shape, torch.int64)
        require_tensor(op, "best", self.best, (None,), *FLOATS)
        require_tensor(op, "faulty", self.faulty, (rows,), torch.bool)
        for name in ("path", "node_at", "parent", "best"):
            require_at_least(op, f"entries of {name}", getattr(self, name).shape[-1], 1)


class Settled(NamedTuple):
    """Buffers of at least B rows, int64."""

    outcome: Tensor
    """`[B, facts + D + 1]`, for the host: `FACTS`, then emitted tokens, -1 padded."""
    path: Tensor  # `[B, D + 1]`, of the walk
    path_at: Tensor  # `[B, D + 1]`, its nodes on the packed axis
    read_ids: Tensor  # `[B, D + 1]`, emitted tokens for the drafter, padded with 0
    read_place: Tensor  # `[B, D + 1]`, their entries, which are their positions
    last: Tensor  # `[B]`, column of the last emitted token
    next_root: Tensor  # `[B]`, that token

    def check(self, op: str, num_rows: int, steps: int) -> None:
        """Rejects buffers that are too small."""
        rows = max(num_rows, len(self.outcome))
        for name in self._fields:
            is_column, facts = name in ("last", "next_root"), len(FACTS) * (name == "outcome")
            buffer, shape = getattr(self, name), (rows,) if is_column else (rows, facts + steps)
            require_tensor(op, f"settled.{name}", buffer, shape, torch.int64)
            require_dense(op, f"settled.{name}", buffer, None if facts or is_column else self.path)


def new_opened(num_slots: int, width: int, num_words: int, device: torch.device) -> Opened:
    integers = torch.zeros(5, num_slots, width, dtype=torch.int64, device=device)
    slots, token_ids, parent, position_ids, place = integers
    keep = torch.zeros(num_slots, width, dtype=torch.bool, device=device)
    words = torch.zeros(num_slots, width, num_words, dtype=torch.int32, device=device)
    return Opened(slots, keep, token_ids, parent, position_ids, place, words)


def new_settled(num_slots: int, steps: int, device: torch.device) -> Settled:
    outcome = torch.zeros(num_slots, len(FACTS) + steps, dtype=torch.int64, device=device)
    tables = torch.zeros(4, num_slots, steps, dtype=torch.int64, device=device)
    columns = torch.zeros(2, num_slots, dtype=torch.int64, device=device)
    return Settled(outcome, *tables, *columns)


def open_tree(pool: DraftPool, root_ids: Tensor, vacant: Tensor, opened: Opened) -> None:
    """Empties the pool except its roots, and opens the roots.

    For each row b, as a loop:

        for i in range(P):
            parent[b, i], joint_logp[b, i] = -2, -inf
        every column of [b, 0] = 0
        token_ids[b, 0], parent[b, 0] = root_ids[b], -1
        opened.slots[b, 0], opened.keep[b, 0] = 0, not vacant[b]

    Args:
        pool: the first B rows, written in place. root_ids: `[B]` int64.
        vacant: `[B]` bool, rows without a request: nothing is drafted below their roots.
        opened: the first B rows of at least one column. As in `open_level` its columns are dense
            and lie alike, whatever lies between their rows.

    Raises:
        UsageError: other dtypes or shapes, or several devices.
    """
    op = "open_tree"
    check_pool(op, pool)
    rows = len(pool.parent)
    require_tensor(op, "root_ids", root_ids, (rows,), torch.int64)
    require_tensor(op, "vacant", vacant, (rows,), torch.bool)
    opened.check(op, rows)
    for name, column in (("pool", pool.parent), ("opened", opened.slots)):
        require_at_least(op, f"entries of {name}", column.shape[1], 1)
    module = implementation(__name__, op, *pool, root_ids, vacant, *opened)
    module.open_tree(pool, root_ids, vacant, opened)


def open_level(
    pool: DraftPool,
    slots: Tensor,
    keep: Tensor,
    vacant: Tensor,
    stable: Tensor,
    above: Tensor | None,
    opened: Opened,
    *,
    start: int,
    top_k: int,
    depth: int,
    behind: int,
) -> None:
    """Writes the drafter's next inputs: the chosen nodes of the level just drafted.

    For each row b and w in range(W), as a loop:

        opened.slots[b, w], opened.keep[b, w] = slots[b, w], keep[b, w] and not vacant[b]
        opened.token_ids[b, w] = pool.token_ids[b, slots[b, w]]
        column = (slots[b, w] - start) // top_k if depth > 1 else 0
        opened.parent[b, w] = column
        opened.words[b, w] = above[b, column] if depth > 1 else nothing
        opened.words[b, w] |= bit (behind + w) % 32 of word (behind + w) // 32
        opened.position_ids[b, w] = stable[b] + depth - 1
        opened.place[b, w] = stable[b] + behind + w

    Args:
        slots: `[B, W]` int64 pool slots of that level. keep: `[B, W]` bool. Any strides.
        stable: `[B]` int64, entries that the drafter has read.
        above: `[B, W', words]` int32, the nodes seen by each node of the level before; another
            buffer than `opened.words`. None below the root, where it is not read.
        opened: written in its first B rows and W columns.
        start: first slot of the level. top_k: children of a node. depth: of the chosen nodes.
        behind: nodes that the drafter evaluated in the levels before.

    Raises:
        UsageError: other dtypes or shapes, several devices, or no words of the level before.
    """
    op = "open_level"
    check_pool(op, pool)
    require_tensor(op, "slots", slots, (len(pool.parent), None), torch.int64)
    rows, width = slots.shape
    require_tensor(op, "keep", keep, (rows, width), torch.bool)
    require_tensor(op, "vacant", vacant, (rows,), torch.bool)
    require_tensor(op, "stable", stable, (rows,), torch.int64)
    opened.check(op, rows)
    num_words = opened.words.shape[2]
    if above is not None:
        require_tensor(op, "above", above, (rows, None, num_words), torch.int32)
    if depth > 1 and (above is None or above.data_ptr() == opened.words.data_ptr() != 0):
        problem = "above is missing" if above is None else "above is the buffer of opened.words"
        refuse(op, problem, "give the words of the level before, in a buffer of their own")
    require_at_most(op, "nodes", behind + width, 32 * num_words)
    require_at_most(op, "width", width, opened.slots.shape[1])
    given = (slots, keep, vacant, stable, above)
    module = implementation(__name__, op, *pool, *given, *opened)
    module.open_level(pool, *given, opened, start, top_k, depth, behind)


def lay_out(
    tree: BuiltTree, prefix: Tensor, positions: Tensor, *, num_tokens: int, last_place: int
) -> Laid:
    """Lays the trees of a batch end to end on an axis of a fixed length.

    As a loop:

        offsets[0] = 0
        for b in range(B):
            offsets[b + 1] = offsets[b] + num_nodes[b]
            for n in range(N):
                at = offsets[b] + n
                node_at[b, n] = min(at, T - 1)
                if n < num_nodes[b] and at < T:
                    row[at], place[at] = b, prefix[b] + n
                    token_ids[at], position_ids[at] = tree.token_ids[b, n], tree.position_ids[b, n]
                    positions[at] = positions[b] + tree.depth[b, n]
                    words[at] = tree.ancestor_bits[b, n]
        for at in range(offsets[B], T):                 # the rest writes to an unread entry
            place[at] = last_place
            row[at], token_ids[at], position_ids[at], positions[at], words[at] = 0

    The fused kernel takes trees of up to 1,024 nodes.

    Args:
        tree: of `link_tree`. prefix: `[B]` int64, entries of each slot before its tree.
        positions: `[B]` int64, output position of each root's successor.
        num_tokens: T, at least all nodes together; more would be left out.
        last_place: an entry of a slot that no request reads.

    Raises:
        UsageError: other dtypes or shapes, several devices, more than 1,024 rows, or no rows,
            nodes or places.
    """
    op, rows = "lay_out", len(tree.parent)
    require_tensor(op, "parent", tree.parent, (None, None), torch.int64)
    for name in ("token_ids", "position_ids", "depth"):
        require_tensor(op, name, getattr(tree, name), tuple(tree.parent.shape), torch.int64)
    require_tensor(op, "num_nodes", tree.num_nodes, (rows,), torch.int64)
    words = (*tree.parent.shape, ceil_div(tree.parent.shape[1], WORD_BITS))
    require_tensor(op, "ancestor_bits", tree.ancestor_bits, words, torch.int32)
    require_tensor(op, "prefix", prefix, (rows,), torch.int64)
    require_tensor(op, "positions", positions, (rows,), torch.int64)
    require_at_most(op, "rows", rows, MAX_ROWS)
    require_at_least(op, "rows", rows, 1)
    require_at_least(op, "entries of parent", tree.parent.shape[1], 1)
    require_at_least(op, "num_tokens", num_tokens, 1)
    module = implementation(__name__, op, *tree, prefix, positions)
    laid: Laid = module.lay_out(tree, prefix, positions, num_tokens, last_place)
    return laid


def settle(found: Walked, settled: Settled) -> None:
    """Writes a round's outcome for the host and for the drafter's next reading.

    For each row b, as a loop, with c the nodes of its path:

        c = sum(path[b, d] >= 0 for d in range(D + 1))
        levels = max((depth[b, i] for i in range(P) if parent[b, i] > -2), default=0)
        wanted = sum(submitted[b, n] >= 0 for n in range(M))
        finite = all(isfinite(best[node_at[b, n]]) for n in range(num_nodes[b]))
        outcome[b] = [c, num_nodes[b], levels, faulty[b], finite, wanted, *token_ids[b]]
        for d in range(D + 1):
            settled.path[b, d] = path[b, d]
            path_at[b, d] = node_at[b, max(path[b, d], 0)]
            read_ids[b, d] = max(token_ids[b, d], 0)
            read_place[b, d] = stable[b] + d
        last[b] = max(c - 1, 0)
        next_root[b] = read_ids[b, last[b]]

    The fused kernel takes paths of up to 128 nodes.

    Args:
        found: tables with dense rows are read where they are, others are copied first.
        settled: the first B rows are written. Its tables of `[S, D + 1]` lie alike, with dense
            rows.

    Raises:
        UsageError: other dtypes or shapes, or several devices.
    """
    op = "settle"
    found.check(op)
    settled.check(op, *found.path.shape)
    implementation(__name__, op, *found, *settled).settle(found, settled)
