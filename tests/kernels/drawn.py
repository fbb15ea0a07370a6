"""Inputs of the ops, drawn at random, and buffers full of junk for them to fill."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.kernels.bookkeeping import FACTS, Opened, Settled, Walked
from specctl.kernels.policy_eval import PolicyBuffer
from specctl.kernels.policy_eval.layout import pack
from specctl.kernels.tree_build import BuiltTree
from specctl.policy import Shape, StaticTree
from specctl.runtime.deciders import table_of
from specctl.tree import Children, DraftPool
from tests.kernels.helpers import CPU

INF = math.inf
NUM_ROWS = 100_000
LARGE = 1 << 40
JUNK = -(1 << 60)
SPARE = 2
"""Rows of the buffers that no batch has."""
BASE = StaticTree(depth=2, top_k=4, num_tokens=12)

# --------------------------------------------------------------------------- pools


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


def empty_pool(size: Growth, device: torch.device) -> DraftPool:
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
    return DraftPool(*integers[:3], *floats[:4], integers[3], expanded, floats[4])


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


def random_forest(seed: int, rows: int, size: int, num_tokens: int) -> tuple[DraftPool, Tensor]:
    """Pools whose chosen nodes are closed in no row but by chance, ascending, root first."""
    draw = np.random.default_rng(seed)
    pool = empty_pool(Growth(rows, 1, 1, size - 1), CPU)
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


def level_pool(joint_logp: Tensor, seed: int) -> DraftPool:
    """Pools of a root and one level with these path log-probabilities."""
    rows, size = joint_logp.shape
    pool = empty_pool(Growth(rows, 1, 1, size), CPU)
    draw = torch.Generator().manual_seed(seed)
    pool.parent[:, 1:], pool.depth[:, 1:] = 0, 1
    pool.joint_logp[:, 1:], pool.draft_logp[:, 1:] = joint_logp, joint_logp
    for column in (pool.entropy, pool.topk_entropy, pool.path_entropy):
        column[:, 1:] = 4 * torch.rand(rows, size, generator=draw) ** 2
    pool.sibling_rank[:, 1:] = torch.randint(16, (rows, size), generator=draw)
    return pool


def phi_pool(value: Tensor) -> DraftPool:
    """Pools of a root and one node, at which Φ has these values."""
    pool = level_pool(torch.full((len(value), 1), -1.0), 0)
    pool.path_entropy[:, 1] = value
    return pool


# --------------------------------------------------------------------------- policies


def buffer_of(shape: Shape, device: torch.device) -> PolicyBuffer:
    table = table_of(shape)
    assert table is not None
    return pack(table).to(device)


def edge_rows(bars: Tensor, seed: int, num_rows: int = NUM_ROWS) -> Tensor:
    """Every bar, its float32 neighbours, the odd ones of float32, and random values around."""
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan])
    edges = torch.cat([bars, torch.nextafter(bars, up), torch.nextafter(bars, down), odd])
    draw = torch.Generator().manual_seed(seed)
    spread = float(bars.std(correction=0)) + 0.5
    rest = bars.mean() + 2 * spread * torch.randn(num_rows - len(edges), generator=draw)
    return torch.cat([edges, rest])[torch.randperm(num_rows, generator=draw)]


# --------------------------------------------------------------------------- bookkeeping


class Level(NamedTuple):
    """Chosen nodes of a level: so many before it, of so many parents with `top_k` children."""

    rows: int
    width: int
    num_words: int = 1
    depth: int = 1
    parents: int = 1
    top_k: int = 10
    behind: int = 0


class Axis(NamedTuple):
    """Trees of up to `columns` nodes, and places that they leave; fewer than none cuts them."""

    rows: int
    columns: int
    spare: int = 0


class Round(NamedTuple):
    """Rows, steps of a path, nodes of a tree, slots of a pool, submitted nodes, spare places."""

    rows: int
    steps: int
    columns: int
    size: int
    submitted: int
    spare: int = 0


def integers(draw: np.random.Generator, *shape: int, most: int = LARGE, least: int = 0) -> Tensor:
    return torch.from_numpy(draw.integers(least, most, shape))


def flags(draw: np.random.Generator, *shape: int, share: float = 0.5) -> Tensor:
    return torch.from_numpy(draw.random(shape) < share)


def bits(draw: np.random.Generator, *shape: int) -> Tensor:
    return integers(draw, *shape, least=-(1 << 31), most=1 << 31).int()


def junk_opened(draw: np.random.Generator, rows: int, width: int, num_words: int) -> Opened:
    """Whole buffers; `views` cuts the ones that an op is given."""
    shape = (rows + SPARE, width + 3)
    words = torch.full((*shape, num_words), 12345, dtype=torch.int32)
    columns = [torch.full(shape, JUNK + i) for i in range(5)]
    return Opened(columns[0], flags(draw, *shape), *columns[1:], words)


def views(buffers: Iterable[Tensor], rows: int, width: int | None = None) -> list[Tensor]:
    """The first rows, and columns, of buffers."""
    first = [buffer[:rows] for buffer in buffers]
    return first if width is None else [part[:, :width] for part in first]


def junk_pool(draw: np.random.Generator, rows: int, size: int) -> DraftPool:
    """Rows lie apart; no column holds a root yet."""
    pool = empty_pool(Growth(rows, 1, 1, size - 1), CPU)
    for column in pool[:-1]:
        column[:, 0] = 7
    pool.token_ids.copy_(integers(draw, rows, size))
    return pool


class Chosen(NamedTuple):
    """Arguments of `open_level`, on the CPU."""

    pool: DraftPool
    slots: Tensor
    keep: Tensor
    vacant: Tensor
    stable: Tensor
    above: Tensor | None


def drawn_level(case: Level, seed: int) -> tuple[Chosen, dict[str, int]]:
    draw = np.random.default_rng(seed)
    rows, num_nodes = case.rows, case.parents * case.top_k
    start = 1 if case.depth == 1 else 3 + case.top_k
    places = draw.permuted(np.tile(np.arange(num_nodes), (rows, 1)), axis=1)[:, : case.width]
    above = None
    if case.depth > 1:
        above = bits(draw, rows + SPARE, case.parents + 2, case.num_words)
    chosen = Chosen(
        pool=junk_pool(draw, rows, start + num_nodes),
        slots=torch.from_numpy(places) + start,
        keep=flags(draw, rows, case.width, share=0.7),
        vacant=flags(draw, rows, share=0.3),
        stable=integers(draw, rows),
        above=above,
    )
    sizes = {"start": start, "top_k": case.top_k, "depth": case.depth, "behind": case.behind}
    return chosen, sizes


def node_counts(draw: np.random.Generator, rows: int, columns: int) -> Tensor:
    """A third of the rows has no nodes, one has all."""
    sizes = integers(draw, rows, most=columns + 1) * flags(draw, rows, share=0.67)
    sizes[rows // 2 :][:1] = columns
    return sizes


def drawn_axis(case: Axis, seed: int) -> tuple[BuiltTree, Tensor, Tensor]:
    """Random numbers in the shape of trees."""
    draw = np.random.default_rng(seed)
    rows, columns = case.rows, case.columns
    table = [integers(draw, rows, columns) for _ in range(5)]
    built = BuiltTree(
        *table[:4],
        torch.full((rows, columns), math.nan),
        *table[4:],
        flags(draw, rows, columns),
        node_counts(draw, rows, columns),
        bits(draw, rows, columns, -(-columns // 32)),
    )
    return built, integers(draw, rows), integers(draw, rows)


def drawn_round(case: Round, dtype: torch.dtype, seed: int) -> Walked:
    """Paths of all lengths; half of the rows hold a logit that is not finite, as padding does."""
    draw = np.random.default_rng(seed)
    rows, steps, columns = case.rows, case.steps, case.columns
    num_nodes = node_counts(draw, rows, columns)
    offsets = torch.nn.functional.pad(num_nodes.cumsum(0), (1, 0))
    total = int(offsets[-1])
    lengths = integers(draw, rows, least=1, most=steps + 1) * (num_nodes > 0)
    ends = torch.arange(steps) >= lengths[:, None]
    path = (integers(draw, rows, steps) % num_nodes.clamp(min=1)[:, None]).masked_fill(ends, -1)
    slots = torch.arange(columns)
    return Walked(
        path=path,
        token_ids=integers(draw, rows, steps).masked_fill(ends, -1),
        num_nodes=num_nodes,
        node_at=(offsets[:-1, None] + slots).clamp(max=total + case.spare - 1),
        best=_logits(draw, num_nodes, total + case.spare).to(dtype),
        parent=integers(draw, rows, case.size, least=-2, most=4),
        depth=integers(draw, rows, case.size, most=90),
        submitted=integers(draw, rows, case.submitted, least=-1, most=3),
        faulty=flags(draw, rows),
        stable=integers(draw, rows),
    )


def _logits(draw: np.random.Generator, sizes: Tensor, num_tokens: int) -> Tensor:
    """The largest that float16 holds are finite; padding never is."""
    best = torch.full((num_tokens,), math.nan)
    at = 0
    for size in sizes.tolist():
        row = best[at : at + size]
        row.copy_(torch.from_numpy(draw.choice([-65504.0, 65504.0, 0.0, 1.5], size)))
        if size and draw.random() < 0.5:
            row[int(draw.integers(size))] = float(draw.choice([math.nan, math.inf, -math.inf]))
        at += size
    return best


def junk_settled(rows: int, steps: int) -> Settled:
    """Whole buffers; `settled_of` cuts the ones that an op is given."""
    shapes = [(steps + len(FACTS) + 1,), *[(steps + 3,)] * 4, (), ()]
    buffers = [torch.full((rows + SPARE, *shape), JUNK + i) for i, shape in enumerate(shapes)]
    return Settled(*buffers)


def settled_of(buffers: Iterable[Tensor]) -> Settled:
    """Views of tables whose rows lie apart."""
    outcome, *tables, last, next_root = buffers
    return Settled(outcome[:, :-1], *(table[:, :-3] for table in tables), last, next_root)
