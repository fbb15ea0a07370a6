"""Growing trees on the device: one function a level, over buffers that stay where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specctl.features import ENTROPY_TOP_K
from specctl.kernels.bookkeeping import Opened, new_opened, open_level, open_tree
from specctl.kernels.node_features import node_features
from specctl.kernels.tree_build import WORD_BITS, Children, Pool, append_level, written
from specctl.policy.rules import ShapeRule
from specctl.runtime.drafter import Drafter
from specctl.runtime.graphs.deciders import Chosen, Decider, Grown
from specctl.runtime.graphs.drafters import Pass, StaticDrafter
from specctl.runtime.graphs.places import Constants
from specctl.runtime.graphs.state import Rows
from specctl.runtime.guard import raising_faults


@dataclass(frozen=True)
class Geometry:
    """Sizes of a growing tree, all known beforehand.

    Attributes:
        widths: nodes expanded at each level from 1 on: the root, then the frontier's.
        starts: first pool slot of each level from 1 on, and the end of the last.
        behind: nodes evaluated before each level from 1 on; the root is none of them.
    """

    widths: tuple[int, ...]
    starts: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def max_depth(self) -> int:
        return len(self.widths)

    @property
    def capacity(self) -> int:
        """Slots of the pool."""
        return self.starts[-1]

    @property
    def max_width(self) -> int:
        return max(self.widths, default=1)

    @property
    def num_words(self) -> int:
        """Words of 32 bits that say which of the nodes a node sees."""
        last = self.behind[-1] + self.widths[-1] if self.widths else 1
        return -(-last // WORD_BITS)


def geometry_of(rule: ShapeRule) -> Geometry:
    """Of a rule's trees."""
    widths, starts, behind = [], [1], []
    width, seen = 1, 0
    for depth in range(1, rule.max_depth + 1):
        widths.append(width)
        behind.append(seen)
        seen += width if depth > 1 else 0
        starts.append(starts[-1] + width * rule.top_k)
        width = min(rule.width, width * rule.top_k)
    return Geometry(tuple(widths), tuple(starts), tuple(behind))


MAX_SLOTS, MAX_CANDIDATES, MAX_BEST, MAX_TOKENS, MAX_CHILDREN = 4096, 1024, 64, 1024, 32
"""What the kernels take: slots of a pool, candidates of a level and how many of them are kept,
nodes of a tree, children of a node."""


def too_large(rule: ShapeRule) -> str | None:
    """Why a rule's trees are beyond the kernels; None if they are not."""
    geometry = geometry_of(rule)
    sizes = (
        ("slots of a pool", geometry.capacity, MAX_SLOTS),
        ("candidates of a level", geometry.max_width * rule.top_k, MAX_CANDIDATES),
        ("nodes expanded of a level", geometry.max_width, MAX_BEST),
        ("nodes of a tree", rule.max_tokens, MAX_TOKENS),
        ("children of a node", rule.top_k, MAX_CHILDREN),
    )
    return next(
        (f"{n} {what}, the kernels take {most}" for what, n, most in sizes if n > most), None
    )


class Report(NamedTuple):
    """What the host learns where drafting may stop.

    Attributes:
        num_going: nodes that would be expanded next. num_tokens: that the batch will verify at
            most; -1 where that is not known yet.
    """

    num_going: int
    num_tokens: int


class Drafting:
    """Trees of up to S requests under one shape.

    Args:
        passes: the drafter's; None for plain decoding.
        draft: for its vocabulary.
        constants: of the loop.
    """

    def __init__(
        self,
        rule: ShapeRule,
        decider: Decider,
        passes: StaticDrafter | None,
        draft: Drafter | None,
        num_slots: int,
        constants: Constants,
    ) -> None:
        self.rule, self.decider, self.constants = rule, decider, constants
        self.passes, self.draft = passes, draft
        self.geometry, device = geometry_of(rule), constants.device
        self.pool = new_pool(num_slots, self.geometry.capacity, device)
        width, num_words = self.geometry.max_width, self.geometry.num_words
        opened = new_opened(num_slots, width, num_words, device)
        # Who sees whom is read of the level before, so it is written beside it.
        self._opened = opened, opened._replace(words=torch.zeros_like(opened.words))
        self.report = torch.zeros(len(Report._fields), dtype=torch.int64, device=device)

    def of_rows(self, num_rows: int) -> Pool:
        """The pool of the first rows."""
        return Pool(*(column[:num_rows] for column in self.pool))

    def begin(self, state: Rows) -> None:
        """The roots, and nothing else; where nothing is drafted, all there is."""
        rows = len(state.root_ids)
        open_tree(self.of_rows(rows), state.root_ids, state.vacant, self._rows_opened(1, rows))
        self.decider.begin(rows)

    def level(self, depth: int, state: Rows) -> None:
        """Drafts a level, decides on it and opens the next.

        Raises:
            PolicyFault: the decision failed.
        """
        rows, geometry = len(state.root_ids), self.geometry
        width, start = geometry.widths[depth - 1], geometry.starts[depth - 1]
        if depth == 1:
            self.begin(state)
        opened = self._rows_opened(depth, rows)
        children, pool = self._children(depth, opened, state), self.of_rows(rows)
        best = append_level(
            pool,
            opened.slots[:, :width],
            opened.keep[:, :width],
            children,
            start=start,
            depth=depth,
            num_best=self.decider.num_best,
        )
        grown = Grown(written(pool, geometry.starts[depth]), best, start, depth, width)
        with raising_faults():
            chosen = self.decider.decide(grown)
        if depth < geometry.max_depth:
            self._open(depth, chosen, state)
        if depth in self.decider.check_levels:
            self._tell(depth, state)

    def _rows_opened(self, depth: int, num_rows: int) -> Opened:
        return Opened(*(part[:num_rows] for part in self._opened[depth % 2]))

    def _open(self, depth: int, chosen: Chosen, state: Rows) -> None:
        """The frontier as the drafter's next level."""
        rows, geometry = len(state.root_ids), self.geometry
        width = geometry.widths[depth]
        above = self._rows_opened(depth, rows).words if depth > 1 else None
        open_level(
            self.of_rows(rows),
            chosen.slots[:, :width],
            chosen.keep[:, :width],
            state.vacant,
            state.stable,
            above,
            self._rows_opened(depth + 1, rows),
            start=geometry.starts[depth - 1],
            top_k=self.rule.top_k,
            depth=depth,
            behind=geometry.behind[depth],
        )

    def _tell(self, depth: int, state: Rows) -> None:
        """Fills the report."""
        rows, is_last = len(state.root_ids), depth == self.geometry.max_depth
        planned = self.decider.planned_tokens(rows)
        if is_last:
            self.report[0] = 0
        else:
            width = self.geometry.widths[depth]
            self.report[0] = self._rows_opened(depth + 1, rows).keep[:, :width].sum()
        self.report[1] = -1 if planned is None else (planned * ~state.vacant).sum()

    def _children(self, depth: int, opened: Opened, state: Rows) -> Children:
        assert self.passes is not None
        assert self.draft is not None
        if depth == 1:
            logits = self.passes.root_logits(len(state.root_ids))[:, None]
        else:
            width = self.geometry.widths[depth - 1]
            parent = opened.parent[:, :width]
            logits = self.passes.level(self._nodes(depth, opened, state), parent)
        found = node_features(logits, self.rule.top_k, ENTROPY_TOP_K)
        token_ids = self.draft.to_target_ids(found.top_ids)
        return Children(token_ids, found.top_logp, found.entropy, found.topk_entropy)

    def _nodes(self, depth: int, opened: Opened, state: Rows) -> Pass:
        width = self.geometry.widths[depth - 1]
        return Pass(
            token_ids=opened.token_ids[:, :width],
            position_ids=opened.position_ids[:, :width],
            place=opened.place[:, :width],
            words=opened.words[:, :width].flatten(0, 1),
            stable=state.stable,
            behind=self.geometry.behind[depth - 1],
            constants=self.constants,
        )


def new_pool(num_slots: int, capacity: int, device: torch.device) -> Pool:
    """Columns of so many slots."""
    integers = torch.zeros(4, num_slots, capacity, dtype=torch.int64, device=device)
    floats = torch.zeros(5, num_slots, capacity, device=device)
    expanded = torch.zeros(num_slots, capacity, dtype=torch.bool, device=device)
    token_ids, parent, depth, sibling_rank = integers
    *four, path_entropy = floats
    return Pool(token_ids, parent, depth, *four, sibling_rank, expanded, path_entropy)  # type: ignore[call-arg]
