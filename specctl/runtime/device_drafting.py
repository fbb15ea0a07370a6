"""Drafting by kernels: the tree grows and is cut on the device.

Static trees, HeteroSpec, ECHO, C2T and the joint threshold have kernels (`runtime.deciders`); other
shapes draft by their torch rules (`policy.growing.grow_tree`), between captured parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.kernels.bookkeeping import Opened, new_opened, open_level, open_tree
from specctl.kernels.tree_build import append_level, select_nodes
from specctl.policy.rules import ShapeRule
from specctl.runtime.attention import Pass, PassTables
from specctl.runtime.deciders import Geometry, Grown, StaticDecider
from specctl.runtime.drafter import Drafter, children_of
from specctl.runtime.state import Rows
from specctl.tree import PAD, Children, DraftPool


class DraftBuffers:
    """Drafts of up to S requests at fixed addresses, written by kernels or copied from rules.

    Attributes:
        pool: columns `[S, P]`.
        submitted: `[S, N]` int64 pool slots, ascending, -1 padded; -1 in rows without a request.
        faulty: `[S]` bool, rows with NaN scores.
    """

    def __init__(self, rule: ShapeRule, num_slots: int, device: torch.device) -> None:
        capacity = Geometry.of(rule).capacity
        integers = torch.zeros(4, num_slots, capacity, dtype=torch.int64, device=device)
        floats = torch.zeros(5, num_slots, capacity, device=device)
        expanded = torch.zeros(num_slots, capacity, dtype=torch.bool, device=device)
        token_ids, parent, depth, rank = integers
        *four, path_entropy = floats
        self.pool = DraftPool(token_ids, parent, depth, *four, rank, expanded, path_entropy)  # type: ignore[call-arg]
        self.submitted = torch.full((num_slots, rule.max_tokens), -1, device=device)
        self.faulty = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def rows(self, num_rows: int) -> DraftPool:
        return self.pool.rows(slice(num_rows))

    def submit(self, chosen: Tensor) -> None:
        """Stores the first rows' nodes, `[B, N']`; other rows submit nothing."""
        self.submitted.fill_(-1)
        self.submitted[: len(chosen), : chosen.shape[1]] = chosen

    def take(self, pool: DraftPool, submitted: Tensor) -> None:
        """Copies a draft of a rule."""
        rows, size = pool.parent.shape
        self.pool.parent.fill_(PAD)
        for own, column in zip(self.pool, pool, strict=True):
            if own is not None and column is not None:
                own[:rows, :size] = column
        self.faulty.fill_(False)
        self.submit(submitted)


class KernelDrafting:
    """Grows trees of up to S requests by kernels, over buffers that stay where they are.

    Attributes:
        report: `[2]` int64, read by the host where drafting may stop: nodes to expand next, and
            nodes that the batch verifies at most, -1 while unknown.
    """

    def __init__(
        self,
        rule: ShapeRule,
        decider: StaticDecider,
        drafter: Drafter | None,
        buffers: DraftBuffers,
        tables: PassTables,
        capacity: int,
    ) -> None:
        self.rule, self.decider, self.drafter = rule, decider, drafter
        self.buffers, self.tables, self.capacity = buffers, tables, capacity
        self.geometry, device = Geometry.of(rule), tables.device
        num_slots = len(buffers.faulty)
        opened = new_opened(num_slots, self.geometry.max_width, self.geometry.num_words, device)
        # A level reads the words of the level before, so two buffers take turns.
        self._opened = opened, opened._replace(words=torch.zeros_like(opened.words))
        self.report = torch.zeros(2, dtype=torch.int64, device=device)

    def whole(self, state: Rows) -> None:
        for depth in range(1, self.rule.max_depth + 1):
            self.level(depth, state)
        self.select(state)

    def level(self, depth: int, state: Rows) -> None:
        """Drafts a level, decides on it and prepares the next."""
        rows, geometry = len(state.root_ids), self.geometry
        width, start = geometry.widths[depth - 1], geometry.starts[depth - 1]
        if depth == 1:
            self._begin(state)
        opened, pool = self._opened_rows(depth, rows), self.buffers.rows(rows)
        best = append_level(
            pool,
            opened.slots[:, :width],
            opened.keep[:, :width],
            self._children(depth, width, opened, state),
            start=start,
            depth=depth,
            num_best=self.decider.num_best,
        )
        grown = Grown(pool.first(geometry.starts[depth]), best, start, depth, width)
        chosen = self.decider.decide(grown)
        if depth < self.rule.max_depth:
            width = geometry.widths[depth]
            open_level(
                pool,
                chosen.slots[:, :width],
                chosen.keep[:, :width],
                state.vacant,
                state.stable,
                opened.words if depth > 1 else None,
                self._opened_rows(depth + 1, rows),
                start=start,
                top_k=self.rule.top_k,
                depth=depth,
                behind=geometry.behind[depth],
            )
        if depth in self.decider.check_levels:
            self._fill_report(depth, state)

    def select(self, state: Rows) -> None:
        """Selects the nodes to verify; in rows with NaN scores the likeliest ones."""
        rows, size = len(state.root_ids), self.rule.max_tokens
        if self.rule.max_depth == 0:
            self._begin(state)
        pool = self.buffers.rows(rows)
        rank = self.decider.rank(pool)
        chosen = select_nodes(rank.scores, size, limit=rank.limit, min_score=rank.min_score)
        faulty = self.decider.faulty(rows)
        if faulty is not None:
            self.buffers.faulty[:rows] = faulty & ~state.vacant
            chosen = torch.where(faulty[:, None], select_nodes(pool.joint_logp, size), chosen)
        self.buffers.submit(chosen.masked_fill(state.vacant[:, None], -1))

    def _begin(self, state: Rows) -> None:
        rows = len(state.root_ids)
        pool, opened = self.buffers.rows(rows), self._opened_rows(1, rows)
        open_tree(pool, state.root_ids, state.vacant, opened)
        self.decider.begin(rows)

    def _opened_rows(self, depth: int, num_rows: int) -> Opened:
        return Opened(*(part[:num_rows] for part in self._opened[depth % 2]))

    def _fill_report(self, depth: int, state: Rows) -> None:
        # Not by assignment to elements: that is a blocking copy, which no graph can hold.
        rows, going, tokens = len(state.root_ids), self.report[0], self.report[1]
        if depth == self.rule.max_depth:
            going.fill_(0)
        else:
            width = self.geometry.widths[depth]
            going.copy_(self._opened_rows(depth + 1, rows).keep[:, :width].sum())
        planned = self.decider.planned_tokens(rows)
        if planned is None:
            tokens.fill_(-1)
        else:
            tokens.copy_((planned * ~state.vacant).sum())

    def _children(self, depth: int, width: int, opened: Opened, state: Rows) -> Children:
        assert self.drafter is not None
        rows = len(state.root_ids)
        if depth == 1:
            logits = self.drafter.root_logits(rows)[:, None]
        else:
            nodes = Pass(
                token_ids=opened.token_ids[:, :width].flatten(),
                position_ids=opened.position_ids[:, :width].flatten(),
                row=self.tables.rows(rows, width),
                place=opened.place[:, :width].flatten(),
                prefixes=state.stable,
                offsets=self.tables.offsets(rows, width),
                max_nodes=width,
                behind=self.geometry.behind[depth - 1],
                width=self.capacity,
                words=opened.words[:, :width].flatten(0, 1),
            )
            logits = self.drafter.level(nodes, opened.parent[:, :width])
        return children_of(logits, self.rule.top_k, self.drafter.to_target_ids)
