"""`tree_build` against the loops of its docstrings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specctl.kernels.tree_build import COLUMN_TYPES, Best, append_level, link_tree, select_nodes
from specctl.tree import Children, DraftPool
from tests.kernels.drawn import Growth, drawn_children, empty_pool, random_forest
from tests.kernels.helpers import CPU, assert_same, moved, poisoned, spread
from tests.kernels.loops import INF, appended, built, selected

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
