"""The chains of a dense log: of every tree the drafter's likeliest path, and nothing else.

A chain is a hundredth of a tree, so the chains of hundreds of requests stand in memory together,
can be gone over as often as a fit likes, and step side by side where order matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specctl.logs import tree_log
from specctl.logs.positions import join_positions
from specctl.logs.tree_log import DenseLog, LogChunk


def read_chains(
    log: DenseLog,
    *,
    extra: tuple[str, ...] = (),
    on_positions: Callable[[int], None] | None = None,
) -> DenseLog:
    """The chains of a log, in memory; whatever drafts with one child a node replays alike.

    Args:
        extra: further columns of the nodes table to keep.
        on_positions: called with the positions of each finished chunk.
    """
    chains = log.each(chain_of, extra=extra, on_positions=on_positions)
    support = replace(log.support, top_k=1, width=1)
    return replace(log, support=support, held=tuple(_joined(chains)), prompts=None)


def chain_of(chunk: LogChunk) -> LogChunk:
    """The same positions with the first child of each node alone."""
    levels = [chunk.root]
    for _ in range(chunk.support.depth):
        above = levels[-1]
        levels.append(chunk.first_child[above.clamp(min=0)].masked_fill(above < 0, -1))
    nodes = torch.stack(levels, 1)
    exists = nodes >= 0
    index, sizes = nodes[exists], exists.sum(1)
    ends = sizes.cumsum(0) - 1
    first_child = torch.arange(1, len(index) + 1)
    first_child[ends] = -1
    on_path = chunk.on_path[nodes.clamp(min=0)] & exists
    of_nodes: dict[str, Any] = {name: getattr(chunk, name)[index] for name in _OF_NODES}
    return replace(
        chunk,
        support=replace(chunk.support, top_k=1, width=1),
        matched=(on_path.sum(1) - 1).to(torch.int32).numpy(),
        root=ends - sizes + 1,
        first_child=first_child,
        extra={name: values[index.numpy()] for name, values in chunk.extra.items()},
        **of_nodes,
    )


_OF_NODES = ("on_path", "known", "draft_logp", "entropy", "topk_entropy")


def _joined(chunks: Iterable[LogChunk]) -> Iterator[LogChunk]:
    """Chunks of about `CHUNK_NODES` nodes."""
    held: list[LogChunk] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(part.num_nodes for part in held) >= tree_log.CHUNK_NODES:
            yield join_chunks(held)
            held = []
    if held:
        yield join_chunks(held)


def join_chunks(chunks: list[LogChunk]) -> LogChunk:
    """The requests of all chunks in one."""
    before = np.cumsum([0, *(chunk.num_nodes for chunk in chunks)])[:-1].tolist()
    joined: dict[str, Any] = {
        name: torch.cat([getattr(chunk, name) for chunk in chunks]) for name in _OF_NODES
    }
    for name in ("root", "first_child"):
        pairs = zip((getattr(chunk, name) for chunk in chunks), before, strict=True)
        joined[name] = torch.cat([torch.where(v < 0, v, v + first) for v, first in pairs])
    extra = {n: np.concatenate([chunk.extra[n] for chunk in chunks]) for n in chunks[0].extra}
    return replace(
        chunks[0],
        positions=join_positions([chunk.positions for chunk in chunks]),
        matched=np.concatenate([chunk.matched for chunk in chunks]),
        extra=extra,
        **joined,
    )
