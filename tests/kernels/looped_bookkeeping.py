"""The docstrings of `bookkeeping` as loops, on the CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specctl.kernels.bookkeeping import Laid, Opened, Settled, Walked
from specctl.kernels.tree_build import BuiltTree, Pool


def open_tree(pool: Pool, root_ids: Tensor, vacant: Tensor, opened: Opened) -> None:
    rows, size = pool.parent.shape
    for b in range(rows):
        for i in range(size):
            pool.parent[b, i], pool.joint_logp[b, i] = -2, -math.inf
        for column in pool:
            column[b, 0] = 0
        pool.token_ids[b, 0], pool.parent[b, 0] = root_ids[b], -1
        opened.slots[b, 0], opened.keep[b, 0] = 0, not vacant[b]


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
    num_words = opened.words.shape[2]
    for b in range(len(slots)):
        for w in range(slots.shape[1]):
            slot = int(slots[b, w])
            opened.slots[b, w] = slot
            opened.keep[b, w] = bool(keep[b, w]) and not vacant[b]
            opened.token_ids[b, w] = pool.token_ids[b, slot]
            column = (slot - start) // top_k if depth > 1 else 0
            opened.parent[b, w] = column
            words = [0] * num_words
            if depth > 1:
                assert above is not None
                words = [int(word) & 0xFFFFFFFF for word in above[b, column]]
            words[(behind + w) // 32] |= 1 << (behind + w) % 32
            opened.words[b, w] = torch.tensor([_signed(word) for word in words])
            opened.position_ids[b, w] = int(stable[b]) + depth - 1
            opened.place[b, w] = int(stable[b]) + behind + w


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def lay_out(
    tree: BuiltTree, prefix: Tensor, positions: Tensor, *, num_tokens: int, last_place: int
) -> Laid:
    rows, columns, num_words = tree.ancestor_bits.shape
    sizes = tree.num_nodes.tolist()
    offsets = [sum(sizes[:b]) for b in range(rows + 1)]
    axis = [torch.full((num_tokens,), 99) for _ in range(5)]
    row, place, token_ids, position_ids, output = axis
    words = torch.full((num_tokens, num_words), 99, dtype=torch.int32)
    node_at = torch.full((rows, columns), 99)
    for b in range(rows):
        for n in range(columns):
            at = offsets[b] + n
            node_at[b, n] = min(at, num_tokens - 1)
            if n < sizes[b] and at < num_tokens:
                row[at], place[at] = b, prefix[b] + n
                token_ids[at], position_ids[at] = tree.token_ids[b, n], tree.position_ids[b, n]
                output[at] = positions[b] + tree.depth[b, n]
                words[at] = tree.ancestor_bits[b, n]
    for at in range(offsets[rows], num_tokens):
        place[at] = last_place
        row[at] = token_ids[at] = position_ids[at] = output[at] = 0
        words[at] = 0
    return Laid(torch.tensor(offsets), *axis, words, node_at)


def settle(found: Walked, settled: Settled) -> None:
    rows, steps = found.path.shape
    for b in range(rows):
        path, tokens = found.path[b].tolist(), found.token_ids[b].tolist()
        count = sum(node >= 0 for node in path)
        there = [i for i, up in enumerate(found.parent[b].tolist()) if up > -2]
        levels = max((int(found.depth[b, i]) for i in there), default=0)
        wanted = sum(slot >= 0 for slot in found.submitted[b].tolist())
        first, num_nodes = int(found.offsets[b]), int(found.num_nodes[b])
        finite = all(math.isfinite(x) for x in found.best[first : first + num_nodes].tolist())
        facts = [count, num_nodes, levels, bool(found.faulty[b]), finite, wanted]
        settled.outcome[b] = torch.tensor([*map(int, facts), *tokens])
        for d in range(steps):
            settled.path[b, d] = path[d]
            settled.path_at[b, d] = found.node_at[b, max(path[d], 0)]
            settled.read_ids[b, d] = max(tokens[d], 0)
            settled.read_positions[b, d] = settled.read_place[b, d] = int(found.stable[b]) + d
        settled.last[b] = max(count - 1, 0)
        settled.next_root[b] = settled.read_ids[b, settled.last[b]]
