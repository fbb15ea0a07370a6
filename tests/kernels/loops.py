"""The docstrings of `tree_build` as loops, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

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
