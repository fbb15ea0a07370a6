"""A round's draft from the log: the runtime's own growth, with the log in place of a drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from specctl.errors import TraceError
from specctl.features import NO_TEXT, RECENT_TOKENS
from specctl.lazy import Tensor, inference, torch
from specctl.logs.tree_log import LogChunk
from specctl.policy.growing import Growth, grow_tree
from specctl.policy.rules import (
    Frontier,
    Level,
    Plan,
    RoundStart,
    ShapeRule,
    fresh_start,
    rank_order,
)
from specctl.tree import Children, DraftPool, gather

BATCH_POSITIONS = 512
"""Positions drafted together; their pools fit the processor's cache."""


@dataclass(frozen=True)
class Expansions:
    """Expansions that a shape wanted, and their support by the log; `[B]` each."""

    wanted: Tensor  # int64, expanded nodes
    missing: Tensor  # int64, of these, nodes with children that the log lacks
    is_open: Tensor  # bool, children of a node on the path are missing, so the path may go on
    # float32, joint log-probability of the likeliest node with missing children, -inf for none; a
    # bound on all unknown nodes
    best_missing: Tensor


@dataclass(frozen=True)
class LoggedDraft:
    """A round's draft at B positions of a chunk."""

    chunk: LogChunk
    rows: slice | Tensor
    plan: Plan
    pool: DraftPool  # candidates, `[B, P]`
    submitted: Tensor  # `[B, N]` pool indices, -1 padded
    node: Tensor  # `[B, P]` flat log index of each candidate, -1 for none
    expansions: Expansions

    @cached_property
    def on_path(self) -> Tensor:
        """`[B, N]` bool: the path to the submitted node is a prefix of the text."""
        return gather(self.candidates_on_path, self.submitted, 0)

    @property
    def num_accepted(self) -> Tensor:
        """`[B]` draft tokens accepted, before the cut at the end of the text."""
        return self.on_path.sum(1) - 1

    @property
    def remaining(self) -> Tensor:
        """`[B]` int32, tokens of the text from the root on."""
        return torch.from_numpy(self.chunk.positions.remaining)[self.rows]

    @property
    def matched(self) -> Tensor:
        """`[B]` int32, draft tokens on the path within the logged tree."""
        rows = self.rows if isinstance(self.rows, slice) else self.rows.numpy()
        return torch.tensor(self.chunk.matched[rows])

    @property
    def candidates_on_path(self) -> Tensor:
        """`[B, P]` bool: the path to the candidate is a prefix of the text."""
        return self.chunk.on_path[self.node.clamp(min=0)] & (self.node >= 0)

    @property
    def terminal_rank(self) -> Tensor:
        """`[B]` int64: 1-based rank of the deepest accepted node by joint probability, among the
        submitted draft nodes; 0 if none was accepted."""
        index = self.submitted[:, 1:]
        if index.shape[1] == 0:
            return torch.zeros(len(index), dtype=torch.int64)
        scores = self.pool.joint_logp.gather(1, index.clamp(min=0))
        order = rank_order(scores.masked_fill(index < 0, -torch.inf))
        places = torch.arange(1, order.shape[1] + 1)
        return (places * self.on_path[:, 1:].gather(1, order)).amax(1)


@inference
def logged_draft(
    rule: ShapeRule, chunk: LogChunk, rows: slice | Tensor, start: RoundStart | None = None
) -> LoggedDraft:
    """Grows and selects as a live round does.

    Args:
        rows: B positions of the chunk.
        start: the rule's memory of their requests; None for first rounds.

    Raises:
        TraceError: the rule reads the text, and the chunk holds no tokens.
    """
    source = _LogSource(chunk, rows)
    root_ids = torch.zeros_like(source.node[:, 0])
    plan = rule.begin(start or fresh_start(len(root_ids), rule.memory_size))
    if rule.max_depth == 0:
        pool, submitted = Growth(root_ids, 1).level.pool, torch.zeros_like(root_ids)[:, None]
    else:
        recent = recent_text(chunk, rows) if rule.needs_text else None
        pool = grow_tree(rule, plan, source, root_ids, _NoLaps(), recent)
        submitted = rule.select(plan, pool)
    return LoggedDraft(chunk, rows, plan, pool, submitted, source.node, source.expansions)


def logged_drafts(
    rule: ShapeRule, chunk: LogChunk, num_positions: int | None = None
) -> Iterator[LoggedDraft]:
    """Drafts at every position of a chunk, `num_positions` at a time."""
    for rows in batches(chunk.positions.num_rows, num_positions or BATCH_POSITIONS):
        yield logged_draft(rule, chunk, rows)


def batches(num_rows: int, size: int) -> Iterator[slice]:
    """`num_rows` in slices of `size`."""
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def recent_text(chunk: LogChunk, rows: slice | Tensor) -> Tensor:
    """`recent_tokens`: the text up to the roots of some positions."""
    tokens = chunk.token_ids
    if tokens is None:
        raise TraceError(
            "features of the text need dense traces, which hold every token of the text; "
            "these are live",
            hint="collect with --dense, or leave these features out",
        )
    if chunk.recent is not None:
        return torch.from_numpy(chunk.recent)[rows]
    row = torch.arange(chunk.positions.num_rows)[rows]
    first = torch.from_numpy(chunk.positions.start[chunk.positions.request])[row]
    back = row[:, None] - torch.arange(RECENT_TOKENS - 1, -1, -1)
    text = tokens[chunk.root[back.clamp(min=0)]].long()
    return text.masked_fill(back < first[:, None], NO_TEXT)


class _NoLaps:
    """A stopwatch without readings."""

    def lap(self, phase: str, /) -> None:
        del phase


class _LogSource:
    """A `ChildSource` of B positions of a chunk."""

    def __init__(self, chunk: LogChunk, rows: slice | Tensor) -> None:
        self.chunk = chunk
        # `[B, P]` int64, flat log index of every slot of the growing pool, -1 for none
        self.node = chunk.root[rows, None]
        self._tokens = chunk.token_ids
        zero = torch.zeros_like(self.node[:, 0])
        never = torch.full(zero.shape, -torch.inf)
        self.expansions = Expansions(zero, zero, zero > 0, never)

    def children(self, level: Level, frontier: Frontier, top_k: int) -> Children:
        """See `ChildSource`; token ids are 0 unless the chunk was read with them."""
        parents = self.node.gather(1, frontier.index)
        first = self.chunk.first_child[parents.clamp(min=0)].masked_fill(parents < 0, -1)
        known = (first >= 0)[..., None].expand(-1, -1, top_k)
        if top_k > self.chunk.support.top_k:
            known = known & (torch.arange(top_k) < self.chunk.support.top_k)
        index = first[..., None] + torch.arange(top_k)
        index = index.clamp(min=0, max=self.chunk.num_nodes - 1)
        self._count(level.pool, frontier, parents, known)
        self.node = torch.cat([self.node, index.masked_fill(~known, -1).flatten(1)], 1)
        sample = index[..., 0]
        return Children(
            token_ids=torch.zeros_like(index) if self._tokens is None else self._tokens[index],
            logp=self.chunk.draft_logp[index],
            entropy=self.chunk.entropy[sample],
            topk_entropy=self.chunk.topk_entropy[sample],
            known=known,
        )

    def _count(self, pool: DraftPool, frontier: Frontier, parents: Tensor, known: Tensor) -> None:
        """Counts expansions; children of unknown parents are counted at the parent."""
        wanted = frontier.keep & (parents >= 0)
        missing = wanted & ~known.all(-1)
        on_path = missing & self.chunk.on_path[parents.clamp(min=0)]
        joint = pool.joint_logp.gather(1, frontier.index).masked_fill(~missing, -torch.inf)
        before = self.expansions
        self.expansions = Expansions(
            before.wanted + wanted.sum(1),
            before.missing + missing.sum(1),
            before.is_open | on_path.any(1),
            torch.maximum(before.best_missing, joint.amax(1)),
        )
