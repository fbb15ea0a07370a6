"""Logged nodes as a fit meets them: what a shape would have drafted, and what became of it.

The shape grows its trees from the log through the runtime's own code, so features and scores of
the nodes are those that a live round would see. Positions of dense logs and rounds of live ones
are alike here; a live log holds what its policy drafted, so any other shape meets gaps in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy.pruning import PrunedPlan
from specctl.policy.rules import ShapeRule
from specctl.replay.log import TEXT_COLUMNS, DenseLog, LogChunk, Support, Traces
from specctl.replay.outcomes import LoggedDraft, logged_draft
from specctl.replay.positions import Longs
from specctl.tree import gather, path_sum

BATCH_POSITIONS = 512
"""Positions drafted together; their pools stay within the processor's cache."""
Names = NDArray[np.object_]


@dataclass(frozen=True)
class NodeBatch:
    """What a shape drafts at B positions.

    Attributes:
        pool: candidates, `[B, P]`.
        scores: `[B, P]` float32 that a pruning shape gave them, along the path; None of others.
        submitted: `[B, N]` int64 pool indices, -1 padded.
        accepted: `[B, P]` bool, the path is a prefix of the continuation; the root's is.
        known: `[B, P]` bool, the log tells whether it is; false in empty slots.
        longest: `[B]` int64, draft tokens of the longest path accepted that the log holds.
        num_missing: `[B]` int64, expansions that the shape wanted and the log lacks.
        prompt_id, category: `[B]` text.
    """

    pool: DraftPool
    scores: Tensor | None
    submitted: Tensor
    accepted: Tensor
    known: Tensor
    longest: Tensor
    num_missing: Tensor
    prompt_id: Names
    category: Names

    @property
    def told(self) -> Tensor:
        """`[B, P]` bool: the parent was accepted and the log tells of the node itself."""
        return self.known & gather(self.accepted, self.pool.tree.parent, 0)


class LabelledLog(Protocol):
    """A log whose chunks say which nodes' fate is known."""

    @property
    def support(self) -> Support: ...

    def chunks(self, extra: tuple[str, ...] = ()) -> Iterable[LogChunk]: ...

    def known(self, chunk: LogChunk, rows: Tensor, draft: LoggedDraft) -> Tensor:
        """`[B, P]` bool, for valid nodes."""
        ...


@dataclass(frozen=True)
class LabelledDense:
    """A dense log: a node is unknown where the text followed its path and ended before it."""

    log: DenseLog

    @property
    def support(self) -> Support:
        return self.log.support

    def chunks(self, extra: tuple[str, ...] = ()) -> Iterable[LogChunk]:
        return self.log.chunks(extra=extra)

    def known(self, chunk: LogChunk, rows: Tensor, draft: LoggedDraft) -> Tensor:
        tree = draft.pool.tree
        remaining = torch.from_numpy(chunk.positions.remaining)[rows, None]
        followed = gather(_on_path(chunk, draft), tree.parent, 0).bool()
        ended = followed & (tree.depth == remaining + 1)
        return path_sum(ended.float(), tree.parent, int(tree.depth.max())) == 0


@dataclass(frozen=True)
class LoggedNodes:
    """The nodes of a trace set, as often as they are asked for."""

    log: LabelledLog
    num_positions: int
    on_positions: Callable[[int], None] | None = None

    @property
    def support(self) -> Support:
        """What the log holds at every position."""
        return self.log.support

    @torch.inference_mode()
    def batches(
        self, rule: ShapeRule, prompt_ids: Iterable[str] | None = None
    ) -> Iterator[NodeBatch]:
        """What a shape drafts everywhere, in the order of the log.

        Args:
            rule: grows and selects as in a request's first round.
            prompt_ids: only these; None for all.
        """
        wanted = None if prompt_ids is None else frozenset(prompt_ids)
        for chunk in self.log.chunks(TEXT_COLUMNS if rule.needs_text else ()):
            prompts, categories = _names(chunk)
            rows = np.arange(len(prompts))
            if wanted is not None:
                rows = np.flatnonzero([name in wanted for name in prompts])
            for start in range(0, len(rows), BATCH_POSITIONS):
                part = rows[start : start + BATCH_POSITIONS]
                yield self._batch(rule, chunk, part, prompts[part], categories[part])
            if self.on_positions is not None:
                self.on_positions(len(prompts))

    def _batch(
        self, rule: ShapeRule, chunk: LogChunk, rows: Longs, prompts: Names, categories: Names
    ) -> NodeBatch:
        index = torch.from_numpy(rows)
        draft = logged_draft(rule, chunk, index, self.log.support)
        known = self.log.known(chunk, index, draft) & draft.pool.tree.valid
        scores = draft.plan.scores if isinstance(draft.plan, PrunedPlan) else None
        longest = torch.from_numpy(np.minimum(chunk.matched, chunk.positions.remaining)).long()
        return NodeBatch(
            pool=draft.pool,
            scores=scores,
            submitted=draft.submitted,
            accepted=_on_path(chunk, draft) & known,
            known=known,
            longest=longest[index],
            num_missing=draft.expansions.missing,
            prompt_id=prompts,
            category=categories,
        )


def _on_path(chunk: LogChunk, draft: LoggedDraft) -> Tensor:
    """`[B, P]` bool: the text takes the path to the node."""
    return chunk.on_path[draft.node.clamp(min=0)] & (draft.node >= 0)


def _names(chunk: LogChunk) -> tuple[Names, Names]:
    """Prompt and category of every row."""
    positions, request = chunk.positions, chunk.positions.request
    prompts = np.array(positions.prompt_ids, object)[positions.prompt]
    categories = np.array(positions.categories, object)[positions.category]
    return prompts[request], categories[request]


def logged_nodes(
    traces: CountedTraces, on_positions: Callable[[int], None] | None = None
) -> LoggedNodes:
    """The nodes of dense or live traces.

    Raises:
        TraceError, TraceMismatchError, TraceEmptyError: see `DenseLog.open` and `LiveLog.open`.
    """
    from specctl.replay.live_log import LiveLog

    is_dense = "dense" in traces.header.collect
    log: Any = LabelledDense(DenseLog.open(traces)) if is_dense else LiveLog.open(traces)
    return LoggedNodes(log, traces.num_rows("rounds"), on_positions)


class CountedTraces(Traces, Protocol):
    """A trace set that knows its size."""

    def num_rows(self, table: str) -> int: ...
