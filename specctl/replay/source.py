"""A dense log in the place of the drafter: the runtime's own growth, fed from what was logged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.errors import TraceError
from specctl.policy.rules import Frontier
from specctl.replay.log import LogChunk, Support
from specctl.runtime.growth import Children, PoolBuffers
from specctl.suffix import NO_TEXT, RECENT_TOKENS


@dataclass(frozen=True)
class Expansions:
    """What a policy asked of the log, `[B]` each.

    Attributes:
        asked: int64, nodes that it expanded. missing: int64, those whose children the log lacks,
            wholly or in part.
        is_open: bool, the children of a node on the path are missing: the path may go on there.
        best_missing: float32, joint log-probability of the likeliest node with missing children,
            -inf for none: no unknown node is likelier.
    """

    asked: Tensor
    missing: Tensor
    is_open: Tensor
    best_missing: Tensor


class LogSource:
    """Children of B positions of a chunk, from the log.

    Attributes:
        node: `[B, P]` int64, flat log index of every slot of the growing pool, -1 for none.
    """

    def __init__(self, chunk: LogChunk, rows: slice | Tensor, support: Support) -> None:
        self.chunk, self.support = chunk, support
        self.node = chunk.root[rows, None]
        self._tokens = chunk.token_ids
        zero = torch.zeros_like(self.node[:, 0])
        never = torch.full(zero.shape, -torch.inf)
        self.expansions = Expansions(zero, zero, zero > 0, never)

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        """See `ChildSource`; token ids stay 0 unless the chunk was read with them."""
        parents = self.node.gather(1, frontier.index)
        first = self.chunk.first_child[parents.clamp(min=0)].masked_fill(parents < 0, -1)
        known = (first >= 0)[..., None].expand(-1, -1, top_k)
        if top_k > self.support.top_k:
            known = known & (torch.arange(top_k) < self.support.top_k)
        index = first[..., None] + torch.arange(top_k)
        index = index.clamp(min=0, max=self.chunk.num_nodes - 1)
        self._count(pool, frontier, parents, known)
        self.node = torch.cat([self.node, index.masked_fill(~known, -1).flatten(1)], 1)
        sample = index[..., 0]
        return Children(
            token_ids=torch.zeros_like(index) if self._tokens is None else self._tokens[index],
            logp=self.chunk.draft_logp[index],
            entropy=self.chunk.entropy[sample],
            topk_entropy=self.chunk.topk_entropy[sample],
            known=known,
        )

    def _count(self, pool: PoolBuffers, frontier: Frontier, parents: Tensor, known: Tensor) -> None:
        """Books what was asked; below a parent that is itself unknown everything was booked."""
        asked = frontier.keep & (parents >= 0)
        missing = asked & ~known.all(-1)
        on_path = missing & self.chunk.on_path[parents.clamp(min=0)]
        joint = pool.joint_logp.gather(1, frontier.index).masked_fill(~missing, -torch.inf)
        before = self.expansions
        self.expansions = Expansions(
            before.asked + asked.sum(1),
            before.missing + missing.sum(1),
            before.is_open | on_path.any(1),
            torch.maximum(before.best_missing, joint.amax(1)),
        )


def recent_text(chunk: LogChunk, rows: slice | Tensor) -> Tensor:
    """The text before some positions, as a live round knows it: `DraftPool.recent`.

    Raises:
        TraceError: the log holds rounds alone, or was read without `TEXT_COLUMNS`.
    """
    if chunk.token_ids is None:
        raise TraceError(
            "features of the text",
            expected="dense traces, which hold every token of the text",
            found="live ones",
            fix="collect with --dense, or leave these features out",
        )
    row = torch.arange(chunk.positions.num_rows)[rows]
    first = torch.from_numpy(chunk.positions.start[chunk.positions.request])[row]
    back = row[:, None] - torch.arange(RECENT_TOKENS - 1, -1, -1)
    text = chunk.token_ids[chunk.root[back.clamp(min=0)]].long()
    return text.masked_fill(back < first[:, None], NO_TEXT)
