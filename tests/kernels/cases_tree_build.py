"""Pools grown and cut against the loops of the docstrings, on any device."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.kernels.tree_build import (
    Best,
    BuiltTree,
    Children,
    Pool,
    append_level,
    finish_tree,
    link_tree,
    select_nodes,
    written,
)
from tests.kernels.looped_trees import INF, appended, built, selected
from tests.kernels.poison import poisoned


class Growth(NamedTuple):
    """How a pool grows: rows, levels, nodes expanded a level, children each, spare slots."""

    rows: int
    levels: int
    width: int
    top_k: int
    spare: int = 0

    @property
    def capacity(self) -> int:
        return 1 + self.top_k + (self.levels - 1) * self.width * self.top_k + self.spare


GROWTHS = {
    "chain": Growth(1, 5, 1, 1),
    "odd": Growth(4, 4, 3, 5, spare=3),
    "eagle2": Growth(2, 4, 10, 10),
    "widest": Growth(1, 3, 16, 16),
}


def empty_pool(size: Growth, device: torch.device) -> Pool:
    """Nothing but a root; all else is poisoned. Rows lie apart, as slices of a larger buffer."""
    rows, capacity = size.rows, size.capacity
    wide = (rows, capacity + 5)
    integers = [torch.full(wide, 99 + i, device=device)[:, :capacity] for i in range(4)]
    floats = [torch.full(wide, math.nan, device=device)[:, :capacity] for _ in range(5)]
    expanded = torch.ones(wide, dtype=torch.bool, device=device)[:, :capacity]
    for column, value in zip(integers[:3], (7, -1, 0), strict=True):
        column[:, 0] = value
    for column in floats:
        column[:, 0] = 0.0
    expanded[:, 0] = False
    integers[3][:, 0] = 0
    return Pool(*integers[:3], *floats[:4], integers[3], expanded, floats[4])


def drawn_children(draw: np.random.Generator, rows: int, width: int, top_k: int) -> Children:
    """Log-probabilities on a coarse grid, so that scores tie often; some are 0, some -inf."""
    logp = -draw.integers(0, 6, (rows, width, top_k)).astype(np.float32) / 4
    logp[draw.random(logp.shape) < 0.05] = -INF
    uneven = draw.random((rows, 1, 1)) < 0.5  # half of the rows without ties
    logp = np.where(uneven, logp - draw.random(logp.shape).astype(np.float32), logp)
    ids = draw.integers(0, 1 << 40, logp.shape)
    entropy, topk_entropy = draw.random((2, rows, width)).astype(np.float32) * 3
    known = draw.random(logp.shape) < 0.9
    tensors = (torch.from_numpy(np.ascontiguousarray(a)) for a in (ids, logp))
    doubts = (torch.from_numpy(np.ascontiguousarray(a)) for a in (entropy, topk_entropy))
    return Children(*tensors, *doubts, torch.from_numpy(known) if draw.random() < 0.5 else None)


# --------------------------------------------------------------------------- checks


def moved(values: NamedTuple, device: torch.device) -> list[Tensor | None]:
    return [None if value is None else value.to(device) for value in values]


def spread(values: Tensor, device: torch.device) -> Tensor:
    """On the device, every second column of something wider."""
    return torch.stack([values, torch.zeros_like(values)], 2).to(device).flatten(1)[:, ::2]


def assert_same(found: NamedTuple, wanted: NamedTuple, what: str) -> None:
    for name, value in found._asdict().items():
        expected = getattr(wanted, name)
        assert value.dtype == expected.dtype, f"{what}, {name}: {value.dtype}"
        assert value.shape == expected.shape, f"{what}, {name}: {value.shape}, {expected.shape}"
        same = torch.equal(value.cpu(), expected)
        assert same, f"{what}, {name}: {value.cpu()}, not {expected}"


def check_growth(seed: int, size: Growth, device: torch.device) -> Pool:
    """Every slot and every frontier equals the loop's; returns the pool on the CPU."""
    draw = np.random.default_rng(seed)
    wanted, found = empty_pool(size, torch.device("cpu")), empty_pool(size, device)
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
        assert_same(written(found, start), written(wanted, start), f"level {depth}")
        keep = torch.from_numpy(draw.random(frontier.shape) < 0.8)
    for name, column, other in zip(Pool._fields, found, wanted, strict=True):
        rest = column[:, start:].cpu()
        assert torch.equal(rest.nan_to_num(5.0), other[:, start:].nan_to_num(5.0)), name
    return written(wanted, start)


def check_finish(pool: Pool, num_tokens: int, device: torch.device, seed: int = 0) -> BuiltTree:
    """Choice, links and both in one, with and without limits; returns the unlimited tree."""
    draw = np.random.default_rng(seed)
    rows, size = pool.parent.shape
    limit = torch.from_numpy(draw.integers(1, num_tokens + 2, rows))
    positions = torch.from_numpy(draw.integers(0, 10_000, rows))
    depth = int(pool.depth.max())
    there = Pool(*moved(pool, device))
    scores = pool.joint_logp
    bar = scores.new_tensor([-1.25])
    for given, least in ((None, None), (limit, None), (None, bar), (limit, bar)):
        chosen = selected(scores, num_tokens, given, -INF if least is None else float(least))
        options = {
            "limit": None if given is None else given.to(device),
            "min_score": None if least is None else least.to(device),
        }
        wanted = built(pool, chosen, depth, positions)
        with poisoned():
            submitted = select_nodes(there.joint_logp, num_tokens, **options)
            linked = link_tree(there, submitted, depth, positions.to(device))
            at_once = finish_tree(
                there,
                there.joint_logp,
                num_tokens,
                depth + 2,
                positions=positions.to(device),
                **options,
            )
        assert submitted.tolist() == chosen
        assert_same(linked, wanted, f"linked, {given}, {least}")
        assert_same(at_once, wanted, f"at once, {given}, {least}")
        if given is None and least is None:
            whole = wanted
    assert size == pool.joint_logp.shape[1]
    return whole


def random_forest(seed: int, rows: int, size: int, num_tokens: int) -> tuple[Pool, Tensor]:
    """Pools whose chosen nodes are closed in no row but by chance, ascending, root first."""
    draw = np.random.default_rng(seed)
    pool = empty_pool(Growth(rows, 1, 1, size - 1), torch.device("cpu"))
    for b in range(rows):
        for i in range(1, size):
            up = int(draw.integers(max(0, i - 8), i))
            pool.parent[b, i], pool.depth[b, i] = up, pool.depth[b, up] + 1
            pool.draft_logp[b, i], pool.token_ids[b, i] = -draw.random(), i
    chosen = torch.full((rows, num_tokens), -1)
    for b in range(rows):
        count = int(draw.integers(1, num_tokens + 1))
        nodes = np.sort(draw.permutation(np.arange(1, size))[: count - 1])
        chosen[b, :count] = torch.from_numpy(np.concatenate([[0], nodes]))
    return pool, chosen


def check_orphans(device: torch.device, seed: int = 4) -> None:
    """Nodes that no way leads to are emptied, where scores should have kept them from standing."""
    pool, chosen = random_forest(seed, 6, 40, 24)
    depth = int(pool.depth.max())
    positions = torch.arange(6)
    wanted = built(pool, chosen.tolist(), depth, positions)
    assert 0 < int(wanted.valid.sum()) < int((chosen >= 0).sum())
    there = Pool(*moved(pool, device))
    with poisoned():
        found = link_tree(there, spread(chosen, device), depth, positions.to(device))
    assert_same(found, wanted, "orphans")
    shallow = built(pool, chosen.tolist(), 2, positions)
    assert not torch.equal(shallow.valid, wanted.valid)
    assert_same(link_tree(there, chosen.to(device), 2, positions.to(device)), shallow, "cut")


def check_edges(device: torch.device) -> None:
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
