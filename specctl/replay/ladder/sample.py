"""A uniform sample of labelled nodes, from one pass over a log of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specctl.replay.ladder.nodes import TARGET_COLUMNS, NodeTable, join_tables, node_table
from specctl.replay.log import DenseLog, LogChunk, Support
from specctl.replay.positions import Floats


@dataclass(frozen=True)
class Sample:
    """Nodes that the text speaks about.

    Attributes:
        nodes: M of them, all `told`. prompt: `[M]` str, whose they are.
        prompt_ids: of the whole log.
    """

    nodes: NodeTable
    prompt: Any
    prompt_ids: tuple[str, ...]


@dataclass
class _Kept:
    """The nodes of the smallest random numbers so far: a uniform sample at any time."""

    num_kept: int
    below: float = 1.0
    tables: list[NodeTable] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    numbers: list[Floats] = field(default_factory=list)

    def add(self, nodes: NodeTable, prompt: Any, numbers: Floats) -> None:
        self.tables.append(nodes)
        self.prompts.append(prompt)
        self.numbers.append(numbers)
        if sum(map(len, self.numbers)) > 2 * self.num_kept:
            self.cut()

    def cut(self) -> None:
        """Back to `num_kept` nodes, the rest forgotten."""
        numbers = np.concatenate(self.numbers)
        if len(numbers) > self.num_kept:
            self.below = float(np.partition(numbers, self.num_kept)[self.num_kept])
        inside = numbers < self.below
        self.tables = [join_tables(self.tables).take(inside)]
        self.prompts = [np.concatenate(self.prompts)[inside]]
        self.numbers = [numbers[inside]]


def sample_nodes(
    log: DenseLog,
    *,
    num_nodes: int,
    seed: int,
    on_positions: Callable[[int], None] = lambda _: None,
) -> Sample:
    """Reads a log once; `num_nodes` at most are kept, every labelled node as likely as another."""
    kept, prompt_ids = _Kept(num_nodes), dict[str, None]()
    for index, chunk in enumerate(log.chunks(extra=TARGET_COLUMNS)):
        generator = np.random.default_rng([seed, index])
        kept.add(*_labelled(chunk, log.support, generator, kept.below))
        prompt_ids |= dict.fromkeys(chunk.positions.prompt_ids)
        on_positions(chunk.positions.num_rows)
    kept.cut()
    return Sample(kept.tables[0], kept.prompts[0], tuple(prompt_ids))


def _labelled(
    chunk: LogChunk, support: Support, generator: np.random.Generator, below: float
) -> tuple[NodeTable, Any, Floats]:
    """The chunk's labelled nodes whose random number is small enough."""
    nodes = node_table(chunk, support)
    numbers = generator.random(len(nodes.row))
    chosen = nodes.told & (numbers < below)
    taken = nodes.take(chosen)
    positions = chunk.positions
    prompt = np.array(positions.prompt_ids)[positions.prompt][positions.request]
    return taken, prompt[taken.row], numbers[chosen]
