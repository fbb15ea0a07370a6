"""`tree_build` against the loops of its docstrings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from specctl.kernels.tree_build import (
    COLUMN_TYPES,
    Best,
    BuiltTree,
    append_level,
    link_tree,
    select_nodes,
)
from specctl.tree import Children, DraftPool
from tests.kernels.drawn import Growth, drawn_children, empty_pool, random_forest
from tests.kernels.helpers import CPU, assert_same, moved, poisoned, spread

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


GROWTHS = {
    "chain": Growth(1, 5, 1, 1),
    "odd": Growth(4, 4, 3, 5, spare=3),
    "eagle2": Growth(2, 4, 10, 10),
    "widest": Growth(1, 3, 16, 16),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_a_tree_grows_and_is_cut_as_the_loops_say(name: str, device: torch.device) -> None:
    pool = grown(len(name), GROWTHS[name], device)
    for num_tokens in (1, 9, 60):
        check_cut(pool, num_tokens, device)


def grown(seed: int, size: Growth, device: torch.device) -> DraftPool:
    """Every slot and every frontier equals the loop's; returns the pool on the CPU."""
    draw = np.random.default_rng(seed)
    wanted, found = empty_pool(size, CPU), empty_pool(size, device)
    frontier = torch.zeros(size.rows, 1, dtype=torch.int64)
    keep = torch.ones_like(frontier, dtype=torch.bool)
    start = 1
    for depth in range(1, size.levels + 1):
        children = drawn_children(draw, size.rows, frontier.shape[1], size.top_k)
        ranked = appended(wanted, frontier, keep, children, start, depth)
        with poisoned():
            best = append_level(
                found,
                spread(frontier, device),
                keep.to(device)[:, :1].expand_as(keep) if bool(keep.all()) else keep.to(device),
                Children(*moved(children, device)),
                start=start,
                depth=depth,
                num_best=size.width,
            )
        start += children.token_ids[0].numel()
        frontier = torch.tensor([row[: size.width] for row in ranked])
        expected = Best(frontier, wanted.joint_logp.gather(1, frontier))
        assert_same(best, expected, f"best of level {depth}")
        assert_same(found.first(start), wanted.first(start), f"level {depth}")
        keep = torch.from_numpy(draw.random(frontier.shape) < 0.8)
    for name, column, other in zip(COLUMN_TYPES, found, wanted, strict=False):
        rest = column[:, start:].cpu()
        assert torch.equal(rest.nan_to_num(5.0), other[:, start:].nan_to_num(5.0)), name
    return wanted.first(start)


def check_cut(pool: DraftPool, num_tokens: int, device: torch.device) -> None:
    """Choice and links, with and without limits."""
    draw = np.random.default_rng(num_tokens)
    rows, depth = len(pool.parent), int(pool.depth.max())
    limit = torch.from_numpy(draw.integers(1, num_tokens + 2, rows))
    positions = torch.from_numpy(draw.integers(0, 10_000, rows))
    there, bar = pool.each(lambda one: one.to(device)), torch.tensor([-1.25])
    for given, least in ((None, None), (limit, None), (None, bar), (limit, bar)):
        lowest = -INF if least is None else float(least)
        chosen = selected(pool.joint_logp, num_tokens, given, lowest)
        limits = dict(zip(("limit", "min_score"), moved((given, least), device), strict=True))
        with poisoned():
            submitted = select_nodes(there.joint_logp, num_tokens, **limits)
            linked = link_tree(there, submitted, depth, positions.to(device))
        assert submitted.tolist() == chosen
        assert_same(linked, built(pool, chosen, depth, positions), f"linked, {given}, {least}")


def test_nodes_without_a_way_to_the_root_are_emptied(device: torch.device) -> None:
    pool, chosen = random_forest(4, 6, 40, 24)
    depth = int(pool.depth.max())
    positions = torch.arange(6)
    wanted = built(pool, chosen.tolist(), depth, positions)
    assert 0 < int(wanted.valid.sum()) < int((chosen >= 0).sum())
    there = pool.each(lambda one: one.to(device))
    with poisoned():
        found = link_tree(there, spread(chosen, device), depth, positions.to(device))
    assert_same(found, wanted, "orphans")
    shallow = built(pool, chosen.tolist(), 2, positions)
    assert not torch.equal(shallow.valid, wanted.valid)
    assert_same(link_tree(there, chosen.to(device), 2, positions.to(device)), shallow, "cut")


def test_ties_and_edges(device: torch.device) -> None:
    """Ties of all kinds, both zeros, infinities, NaN, rows of nothing."""
    tiny = 1e-45
    rows = [
        [INF, 0.0, -0.0, 0.0, -tiny, tiny, -0.0, 3e38, -3e38, -INF],
        [0.0] * 10,
        [-INF] * 10,
        [0.0, math.nan, -1.0, math.nan, -INF, -2.0, -3.0, -1.0, -1.0, -1.0],
        [-1.0, -0.5, -0.25, -0.75, -1.0, -1.0, -1.0, -2.0, -0.125, -8.0],
    ]
    scores = torch.tensor(rows)
    for num_tokens in (1, 3, 5, 7, 10, 16):
        wanted = selected(scores, num_tokens, None, -INF)
        with poisoned():
            assert select_nodes(scores.to(device), num_tokens).tolist() == wanted
            apart = select_nodes(spread(scores, device), num_tokens)
        assert apart.tolist() == wanted
