"""What `bookkeeping` is given, drawn at random, and buffers full of junk for it to fill."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.kernels.bookkeeping import Opened, Settled, Walked
from specctl.kernels.bookkeeping.columns import FACTS
from specctl.kernels.tree_build import BuiltTree, Pool
from tests.kernels.cases_tree_build import Growth, empty_pool

CPU = torch.device("cpu")
LARGE = 1 << 40
JUNK = -(1 << 60)
SPARE = 2
"""Rows of the buffers that no batch has."""


class Tree(NamedTuple):
    rows: int
    size: int


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


def junk_pool(draw: np.random.Generator, rows: int, size: int) -> Pool:
    """Rows lie apart; no column holds a root yet."""
    pool = empty_pool(Growth(rows, 1, 1, size - 1), CPU)
    for column in pool:
        column[:, 0] = 7
    pool.token_ids.copy_(integers(draw, rows, size))
    return pool


class Chosen(NamedTuple):
    """Arguments of `open_level`, on the CPU."""

    pool: Pool
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
    table = [integers(draw, rows, columns) for _ in range(7)]
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
        offsets=offsets,
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
    shapes = [(steps + len(FACTS) + 1,), *[(steps + 3,)] * 5, (), ()]
    buffers = [torch.full((rows + SPARE, *shape), JUNK + i) for i, shape in enumerate(shapes)]
    return Settled(*buffers)


def settled_of(buffers: Iterable[Tensor]) -> Settled:
    """Views of tables whose rows lie apart."""
    outcome, *tables, last, next_root = buffers
    return Settled(outcome[:, :-1], *(table[:, :-3] for table in tables), last, next_root)
