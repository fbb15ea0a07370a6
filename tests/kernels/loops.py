"""The docstrings of `tree_build` and `bookkeeping` as loops, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specctl.kernels.bookkeeping import Laid, Opened, Settled, Walked
from specctl.kernels.tree_build import BuiltTree
from specctl.tree import Children, DraftPool

INF = math.inf


def appended(
    pool: DraftPool, frontier: Tensor, keep: Tensor, children: Children, start: int, depth: int
) -> list[list[int]]:
    """The docstring of `append_level`, on numpy views of a CPU pool; ranked candidates."""
    view = pool.each(lambda column: column.numpy())  # type: ignore[arg-type]
    given = [None if part is None else part.numpy() for part in children]
    ids, logp, entropy, topk_entropy, known = given
    rows, width, top_k = children.token_ids.shape
    ranked = []
    for b in range(rows):
        for w in range(width):
            up = int(frontier[b, w])
            view.expanded[b, up] = bool(keep[b, w])
            for k in range(top_k):
                i = start + w * top_k + k
                exists = bool(keep[b, w]) and (known is None or known[b, w, k])
                view.token_ids[b, i], view.draft_logp[b, i] = ids[b, w, k], logp[b, w, k]
                view.parent[b, i] = up if exists else -2
                view.depth[b, i], view.sibling_rank[b, i], view.expanded[b, i] = depth, k, False
                view.entropy[b, i], view.topk_entropy[b, i] = entropy[b, w], topk_entropy[b, w]
                joint = view.joint_logp[b, up] + logp[b, w, k]
                view.joint_logp[b, i] = joint if exists else -INF
                above = view.path_entropy[b, up] if exists else np.float32(0)
                view.path_entropy[b, i] = topk_entropy[b, w] + above
        places = range(start, start + width * top_k)
        ranked.append(sorted(places, key=lambda i: (-view.joint_logp[b, i], i)))
    return ranked


def selected(
    scores: Tensor, num_tokens: int, limit: Tensor | None, min_score: float
) -> list[list[int]]:
    """The docstring of `select_nodes`."""
    rows = []
    for b, row in enumerate(scores.tolist()):
        alive = [i for i, score in enumerate(row) if score > -INF and score >= min_score]
        best = sorted(alive, key=lambda i: (-row[i], i))
        most = num_tokens if limit is None else min(num_tokens, int(limit[b]))
        chosen = sorted(best[:most])
        rows.append(chosen + [-1] * (num_tokens - len(chosen)))
    return rows


def linked(pool: DraftPool, submitted: Sequence[Sequence[int]], max_depth: int) -> list[list[int]]:
    """Parents by the docstring of `link_tree`."""
    found = []
    for b, nodes in enumerate(submitted):
        slot = {node: n for n, node in enumerate(nodes) if node >= 0}
        above = {n: int(pool.parent[b, node]) for node, n in slot.items()}
        up = {n: slot.get(parent, -1) for n, parent in above.items()}
        found.append([_closed(n, up, above, max_depth) for n in range(len(nodes))])
    return found


def _closed(n: int, up: dict[int, int], above: dict[int, int], max_depth: int) -> int:
    """The parent of a node, -2 if no way leads from it to the root."""
    if n not in up or above.get(0) != -1:
        return -2
    at, steps = n, 0
    while up[at] >= 0 and steps < max_depth:
        at, steps = up[at], steps + 1
    return up[n] if at == 0 else -2


def built(
    pool: DraftPool, submitted: Sequence[Sequence[int]], max_depth: int, positions: Tensor
) -> BuiltTree:
    """The docstring of `link_tree`."""
    parents = linked(pool, submitted, max_depth)
    rows, num_tokens = len(parents), len(parents[0])
    tree = BuiltTree(
        submitted=torch.full((rows, num_tokens), -1),
        token_ids=torch.zeros(rows, num_tokens, dtype=torch.int64),
        parent=torch.tensor(parents),
        depth=torch.zeros(rows, num_tokens, dtype=torch.int64),
        draft_logp=torch.zeros(rows, num_tokens),
        position_ids=positions[:, None].repeat(1, num_tokens),
        valid=torch.zeros(rows, num_tokens, dtype=torch.bool),
        num_nodes=torch.zeros(rows, dtype=torch.int64),
        ancestor_bits=torch.zeros(rows, num_tokens, -(-num_tokens // 32), dtype=torch.int32),
    )
    for b, nodes in enumerate(submitted):
        for n, node in enumerate(nodes):
            _build_node(tree, pool, parents[b], b, n, node)
    return tree


def _build_node(tree: BuiltTree, pool: DraftPool, up: list[int], b: int, n: int, node: int) -> None:
    bits = tree.ancestor_bits.numpy().view(np.uint32)
    bits[b, n, n // 32] |= np.uint32(1 << n % 32)
    if up[n] == -2:
        return
    tree.submitted[b, n], tree.valid[b, n] = node, True
    tree.num_nodes[b] += 1
    for name in ("token_ids", "depth", "draft_logp"):
        getattr(tree, name)[b, n] = getattr(pool, name)[b, node]
    tree.position_ids[b, n] += pool.depth[b, node]
    at = up[n]
    while at >= 0:
        bits[b, n, at // 32] |= np.uint32(1 << at % 32)
        at = up[at]


def open_tree(pool: DraftPool, root_ids: Tensor, vacant: Tensor, opened: Opened) -> None:
    rows, size = pool.parent.shape
    for b in range(rows):
        for i in range(size):
            pool.parent[b, i], pool.joint_logp[b, i] = -2, -math.inf
        for column in pool[:-1]:
            column[b, 0] = 0
        pool.token_ids[b, 0], pool.parent[b, 0] = root_ids[b], -1
        opened.slots[b, 0], opened.keep[b, 0] = 0, not vacant[b]


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
        num_nodes = int(found.num_nodes[b])
        finite = all(math.isfinite(found.best[at]) for at in found.node_at[b, :num_nodes].tolist())
        facts = [count, num_nodes, levels, bool(found.faulty[b]), finite, wanted]
        settled.outcome[b] = torch.tensor([*map(int, facts), *tokens])
        for d in range(steps):
            settled.path[b, d] = path[d]
            settled.path_at[b, d] = found.node_at[b, max(path[d], 0)]
            settled.read_ids[b, d] = max(tokens[d], 0)
            settled.read_place[b, d] = int(found.stable[b]) + d
        settled.last[b] = max(count - 1, 0)
        settled.next_root[b] = settled.read_ids[b, settled.last[b]]
