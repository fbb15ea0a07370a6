"""`open_tree`, `open_level`, `lay_out`, `settle`: a round's small integers, a launch a step.

None of them computes much. As torch operations they would be some forty launches a drafted level
and fifty a verification, which in a captured graph cost more than the policy does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.bookkeeping import reference
from specctl.kernels.bookkeeping.columns import Laid, Opened, Settled, Walked
from specctl.kernels.checks import require_at_least, require_at_most, require_tensor
from specctl.kernels.dispatch import runs_fused
from specctl.kernels.tree_build.columns import WORD_BITS, BuiltTree, Pool, check_pool

__all__ = ["Laid", "Opened", "Settled", "Walked", "lay_out", "open_level", "open_tree", "settle"]

MAX_ROWS = 1024


def open_tree(pool: Pool, root_ids: Tensor, vacant: Tensor, opened: Opened) -> None:
    """Empties the pool but for its roots, and opens the roots.

    For each row b, in words a reader can execute:

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
    if not runs_fused(op, *pool, root_ids, vacant, *opened):
        reference.open_tree(pool, root_ids, vacant, opened)
        return
    from specctl.kernels.bookkeeping import fused

    fused.open_tree(pool, root_ids, vacant, opened)


def open_level(
    pool: Pool,
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
    """What a drafter is asked next: the chosen nodes of the level just drafted.

    For each row b and w in range(W), in words a reader can execute:

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
        above: `[B, W', words]` int32, who the nodes of the level before see; another buffer than
            `opened.words`. None below the root, where it is not read.
        opened: written in its first B rows and W columns.
        start: first slot of the level. top_k: children of a node. depth: of the chosen nodes.
        behind: nodes that the drafter evaluated in the levels before.

    Raises:
        UsageError: other dtypes or shapes, several devices, or nobody told what the level before
            sees.
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
    if depth > 1:
        _check_above(op, above, opened.words)
    require_at_most(op, "nodes", behind + width, 32 * num_words)
    require_at_most(op, "width", width, opened.slots.shape[1])
    given = [slots, keep, vacant, stable, *([] if above is None else [above]), *opened]
    if not runs_fused(op, *pool, *given):
        reference.open_level(
            pool, slots, keep, vacant, stable, above, opened, start, top_k, depth, behind
        )
        return
    from specctl.kernels.bookkeeping import fused

    fused.open_level(pool, slots, keep, vacant, stable, above, opened, start, top_k, depth, behind)


def lay_out(
    tree: BuiltTree, prefix: Tensor, positions: Tensor, *, num_tokens: int, last_place: int
) -> Laid:
    """Lays the trees of a batch end to end on an axis of a fixed length.

    In words a reader can execute:

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
        for at in range(offsets[B], T):                 # what is no token writes where nobody reads
            place[at] = last_place
            row[at], token_ids[at], position_ids[at], positions[at], words[at] = 0

    The fused kernel takes trees of up to 1,024 nodes.

    Args:
        tree: of `link_tree`. prefix: `[B]` int64, entries of each slot before its tree.
        positions: `[B]` int64, output position of each root's successor.
        num_tokens: T, at least all nodes together; more would be left out.
        last_place: an entry of a slot that is nobody's.

    Raises:
        UsageError: other dtypes or shapes, several devices, more than 1,024 rows, or no rows,
            nodes or places.
    """
    op, rows = "lay_out", len(tree.parent)
    require_tensor(op, "parent", tree.parent, (None, None), torch.int64)
    for name in ("token_ids", "position_ids", "depth"):
        require_tensor(op, name, getattr(tree, name), tuple(tree.parent.shape), torch.int64)
    require_tensor(op, "num_nodes", tree.num_nodes, (rows,), torch.int64)
    words = (*tree.parent.shape, -(-tree.parent.shape[1] // WORD_BITS))
    require_tensor(op, "ancestor_bits", tree.ancestor_bits, words, torch.int32)
    require_tensor(op, "prefix", prefix, (rows,), torch.int64)
    require_tensor(op, "positions", positions, (rows,), torch.int64)
    require_at_most(op, "rows", rows, MAX_ROWS)
    require_at_least(op, "rows", rows, 1)
    require_at_least(op, "entries of parent", tree.parent.shape[1], 1)
    require_at_least(op, "num_tokens", num_tokens, 1)
    if not runs_fused(op, *tree, prefix, positions):
        return reference.lay_out(tree, prefix, positions, num_tokens, last_place)
    from specctl.kernels.bookkeeping import fused

    return fused.lay_out(tree, prefix, positions, num_tokens, last_place)


def settle(found: Walked, settled: Settled) -> None:
    """What a round came to, for the host and for what comes behind it.

    For each row b, in words a reader can execute, with c the nodes of its path:

        c = sum(path[b, d] >= 0 for d in range(D + 1))
        levels = max((depth[b, i] for i in range(P) if parent[b, i] > -2), default=0)
        wanted = sum(submitted[b, n] >= 0 for n in range(M))
        finite = all(isfinite(best[offsets[b] + n]) for n in range(num_nodes[b]))
        outcome[b] = [c, num_nodes[b], levels, faulty[b], finite, wanted, *token_ids[b]]
        for d in range(D + 1):
            settled.path[b, d] = path[b, d]
            path_at[b, d] = node_at[b, max(path[b, d], 0)]
            read_ids[b, d] = max(token_ids[b, d], 0)
            read_positions[b, d] = read_place[b, d] = stable[b] + d
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
    if not runs_fused(op, *found, *settled):
        reference.settle(found, settled)
        return
    from specctl.kernels.bookkeeping import fused

    fused.settle(found, settled)


def _check_above(op: str, above: Tensor | None, words: Tensor) -> None:
    """Below the first level there is one before, and it is read while the next is written."""
    if above is None or above.data_ptr() == words.data_ptr() != 0:
        raise UsageError(
            f"kernel {op}, above",
            expected="who the level before sees, in another buffer than opened.words",
            found="nothing" if above is None else "the same buffer",
            fix="write levels to two buffers in turn",
        )
