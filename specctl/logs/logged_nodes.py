"""Logged nodes as a fit meets them: what a shape would have drafted, and what became of it.

The shape grows its trees from the log through the runtime's own code, so features and scores of
the nodes are those that a live round would see. Positions of dense logs and rounds of live ones
are alike here; a live log holds what its policy drafted, so any other shape meets gaps in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.features import DraftPool
from specctl.logs import logged_draft as drafting
from specctl.logs.logged_draft import logged_draft
from specctl.logs.trace_set import TraceSet
from specctl.logs.tree_log import TEXT_COLUMNS, DenseLog, LiveLog, Support, open_log
from specctl.policy.pruning import PrunedPlan
from specctl.policy.rules import ShapeRule
from specctl.tree import gather

Names = NDArray[np.object_]


@dataclass(frozen=True)
class NodeBatch:
    """What a shape drafts at B positions.

    Attributes:
        pool: candidates, `[B, P]`.
        scores: `[B, P]` float32 that a pruning shape gave them, along the path; None of others.
        submitted: `[B, N]` int64 pool indices, -1 padded.
        accepted: `[B, P]` bool, the path is a prefix of the text; the root's is.
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
    def labelled(self) -> Tensor:
        """`[B, P]` bool: the parent was accepted and the node's own fate is known."""
        return self.known & gather(self.accepted, self.pool.tree.parent, 0)


@dataclass(frozen=True)
class LoggedNodes:
    """The nodes of a log, as often as they are read."""

    log: DenseLog | LiveLog
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
        for chunk in self.log.chunks(extra=TEXT_COLUMNS if rule.needs_text else ()):
            prompts, categories = chunk.positions.row_prompts, chunk.positions.row_categories
            longest = torch.from_numpy(np.minimum(chunk.matched, chunk.positions.remaining)).long()
            rows = np.arange(len(prompts))
            if wanted is not None:
                rows = np.flatnonzero([name in wanted for name in prompts])
            for part in drafting.batches(len(rows), drafting.BATCH_POSITIONS):
                index = torch.from_numpy(rows[part])
                draft = logged_draft(rule, chunk, index)
                tree, plan = draft.pool.tree, draft.plan
                known = chunk.known[draft.node.clamp(min=0)] & (draft.node >= 0) & tree.valid
                yield NodeBatch(
                    pool=draft.pool,
                    scores=plan.scores if isinstance(plan, PrunedPlan) else None,
                    submitted=draft.submitted,
                    accepted=draft.candidates_on_path & known,
                    known=known,
                    longest=longest[index],
                    num_missing=draft.expansions.missing,
                    prompt_id=prompts[rows[part]],
                    category=categories[rows[part]],
                )
            if self.on_positions is not None:
                self.on_positions(len(prompts))


def logged_nodes(
    traces: TraceSet, on_positions: Callable[[int], None] | None = None
) -> LoggedNodes:
    """The nodes of dense or live traces.

    Raises:
        TraceError, TraceMismatchError, TraceEmptyError: see `DenseLog.open` and `LiveLog.support`.
    """
    nodes = LoggedNodes(open_log(traces), traces.num_rows("rounds"), on_positions)
    _ = nodes.support  # refused now where the number of children varies
    return nodes
