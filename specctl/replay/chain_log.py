"""The chains of a dense log: of every tree the drafter's likeliest path, and nothing else.

A chain is a hundredth of a tree, so the chains of hundreds of requests stand in memory together,
can be gone over as often as a fit likes, and step side by side where order matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.replay.log import CHUNK_NODES, DenseLog, LogChunk, Support
from specctl.replay.positions import join_positions


@dataclass(frozen=True)
class ChainLog(DenseLog):
    """A dense log of chains, in memory; whatever drafts with one child a node replays alike."""

    held: tuple[LogChunk, ...]

    @classmethod
    def of(
        cls,
        log: DenseLog,
        *,
        extra: tuple[str, ...] = (),
        on_positions: Callable[[int], None] | None = None,
    ) -> ChainLog:
        """Reads a log once.

        Args:
            extra: further columns to keep.
        """
        chains = _told(log.chunks(extra=extra), log.support.depth, on_positions)
        support = Support(top_k=1, width=1, depth=log.support.depth, nested=log.support.nested)
        return cls(support, log.digest, log.files, tuple(_joined(chains)), tokens=log.tokens)

    def chunks(
        self, *, with_entropy: bool = True, extra: tuple[str, ...] = ()
    ) -> Iterator[LogChunk]:
        """Everything that is held; more was not kept."""
        del with_entropy
        assert all(name in chunk.extra for name in extra for chunk in self.held)
        return iter(self.held)


def _told(
    chunks: Iterable[LogChunk], depth: int, on_positions: Callable[[int], None] | None
) -> Iterator[LogChunk]:
    for chunk in chunks:
        yield chain_of(chunk, depth)
        if on_positions is not None:
            on_positions(chunk.positions.num_rows)


def chain_of(chunk: LogChunk, depth: int) -> LogChunk:
    """The same positions with the first child of each node alone, down to `depth`."""
    levels = [chunk.root]
    for _ in range(depth):
        above = levels[-1]
        levels.append(chunk.first_child[above.clamp(min=0)].masked_fill(above < 0, -1))
    nodes = torch.stack(levels, 1)
    exists = nodes >= 0
    index, place = nodes[exists], torch.arange(int(exists.sum()))
    sizes = exists.sum(1)
    ends = sizes.cumsum(0) - 1
    first_child = place + 1
    first_child[ends] = -1
    on_path = chunk.on_path[nodes.clamp(min=0)] & exists
    return LogChunk(
        chunk.positions,
        (on_path.sum(1) - 1).to(torch.int32).numpy(),
        ends - sizes + 1,
        first_child,
        chunk.on_path[index],
        chunk.draft_logp[index],
        chunk.entropy[index],
        chunk.topk_entropy[index],
        extra={name: values[index.numpy()] for name, values in chunk.extra.items()},
    )


def _joined(chunks: Iterable[LogChunk]) -> Iterator[LogChunk]:
    """Chunks of about `CHUNK_NODES` nodes."""
    held: list[LogChunk] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(part.num_nodes for part in held) >= CHUNK_NODES:
            yield join_chunks(held)
            held = []
    if held:
        yield join_chunks(held)


def join_chunks(chunks: list[LogChunk]) -> LogChunk:
    """The requests of all chunks in one."""
    before = np.cumsum([0, *(chunk.num_nodes for chunk in chunks)])[:-1].tolist()

    def moved(of: Callable[[LogChunk], Tensor]) -> Tensor:
        pairs = zip(chunks, before, strict=True)
        return torch.cat([torch.where(of(c) < 0, of(c), of(c) + first) for c, first in pairs])

    def column(name: str) -> Tensor:
        return torch.cat([getattr(chunk, name) for chunk in chunks])

    extra: dict[str, Any] = {
        name: np.concatenate([chunk.extra[name] for chunk in chunks]) for name in chunks[0].extra
    }
    return LogChunk(
        join_positions([chunk.positions for chunk in chunks]),
        np.concatenate([chunk.matched for chunk in chunks]),
        moved(lambda chunk: chunk.root),
        moved(lambda chunk: chunk.first_child),
        *(column(name) for name in ("on_path", "draft_logp", "entropy", "topk_entropy")),
        extra=extra,
    )
