"""Drafting on the device by kernels: the tree grows and is cut without asking the host.

Static trees, HeteroSpec, ECHO, C2T and the joint threshold have kernels; every other shape drafts
by its torch rule (`policy.growing.grow_tree`), between captured parts. The torch rules are the
specification; `tests/kernels/test_policy_eval.py` holds both to the same rounds. All parameters
of a family that has some stand in one buffer, which a reload overwrites.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.features import ENTROPY_TOP_K
from specctl.kernels.bookkeeping import Opened, new_opened, open_level, open_tree
from specctl.kernels.node_features import node_features
from specctl.kernels.policy_eval import (
    GateState,
    choose_bins,
    close_gates,
    new_gate_state,
    prune_level,
)
from specctl.kernels.policy_eval.layout import PolicyBuffer, PruneTable, pack
from specctl.kernels.tree_build import (
    PAD,
    WORD_BITS,
    Best,
    Children,
    Pool,
    append_level,
    select_nodes,
    written,
)
from specctl.policy import (
    Chain,
    EntropyBins,
    RootOnly,
    Shape,
    SparseGates,
    StaticTree,
)
from specctl.policy.rules import ShapeRule
from specctl.runtime.attention import Pass, PassTables
from specctl.runtime.drafter import Drafter
from specctl.runtime.reload import table_of
from specctl.runtime.state import Rows

MAX_SLOTS, MAX_CANDIDATES, MAX_BEST, MAX_TOKENS, MAX_CHILDREN = 4096, 1024, 64, 1024, 32
"""Limits of the kernels: slots of a pool, candidates of a level and how many of them are kept,
nodes of a tree, children of a node."""


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

    @classmethod
    def of(cls, rule: ShapeRule) -> Geometry:
        """The geometry of a rule's trees."""
        widths, starts, behind = [], [1], []
        width, seen = 1, 0
        for depth in range(1, rule.max_depth + 1):
            widths.append(width)
            behind.append(seen)
            seen += width if depth > 1 else 0
            starts.append(starts[-1] + width * rule.top_k)
            width = min(rule.width, width * rule.top_k)
        return cls(tuple(widths), tuple(starts), tuple(behind))

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


class Grown(NamedTuple):
    """One drafted level of B rows.

    Attributes:
        pool: written up to this level. best: candidates of the level, best first.
        start: first slot of the level. depth: of it. num_parents: nodes it was drafted below.
    """

    pool: Pool
    best: Best
    start: int
    depth: int
    num_parents: int


class Chosen(NamedTuple):
    """The next frontier: `[B, W]` int64 pool slots and `[B, W]` bool, whether to expand."""

    slots: Tensor
    keep: Tensor


class Ranking(NamedTuple):
    """The nodes to submit are those of highest score, `limit` `[B]` of a row at most, none below
    `min_score` `[1]`; `scores` is `[B, P]` float32."""

    scores: Tensor
    limit: Tensor | None = None
    min_score: Tensor | None = None


class StaticDecider:
    """EAGLE-2's frontier and rerank; the base of the deciders of other families.

    A decider decides for rows 0 .. B - 1 of its buffers.

    Attributes:
        num_best: candidates of a level that it wants to see.
        params: its parameters; None for a shape that is known beforehand.
        check_levels: levels behind which every row may have stopped, or knows what it verifies.
    """

    params: PolicyBuffer | None = None
    check_levels: tuple[int, ...] = ()

    def __init__(self, rule: ShapeRule, device: torch.device) -> None:
        self.width = self.num_best = max(1, rule.width)
        self._always = torch.ones(1, 1, dtype=torch.bool, device=device)

    def begin(self, num_rows: int) -> None:
        """Starts a round, on the device's time."""

    def decide(self, level: Grown) -> Chosen:
        """Chooses what to expand, after every level, the deepest too."""
        index = level.best.index
        return Chosen(index, self._always.expand_as(index))

    def rank(self, pool: Pool) -> Ranking:
        """Ranks the whole pool after the last level; deeper levels have empty slots."""
        return Ranking(pool.joint_logp)

    def planned_tokens(self, num_rows: int) -> Tensor | None:
        """`[B]` nodes that rows will verify at most, where that is known before the end."""

    def bins(self, num_rows: int) -> Tensor | None:
        """`[B]` the regime of each row."""

    def stopped_at(self, num_rows: int) -> Tensor | None:
        """`[B]` the level whose gate closed, for budgets."""

    def faulty(self, num_rows: int) -> Tensor | None:
        """`[B]` bool: something decided by was NaN."""


class BinDecider(StaticDecider):
    """HeteroSpec: after the base draft the bin of Φ says how deep and how wide."""

    params: PolicyBuffer

    def __init__(
        self, rule: ShapeRule, record: EntropyBins, params: PolicyBuffer, slots: int
    ) -> None:
        super().__init__(rule, params.storage.device)
        self.params, self.base_depth = params, record.base.depth
        self.check_levels = (record.base.depth,)
        self._plan = torch.zeros(3, slots, dtype=torch.int64, device=params.storage.device)

    def decide(self, level: Grown) -> Chosen:
        index, rows = level.best.index, len(level.best.index)
        bins, max_depth, num_tokens = self._plan[:, :rows]
        if level.depth == self.base_depth:
            found = choose_bins(self.params, level.pool)
            for column, values in zip((bins, max_depth, num_tokens), found[:3], strict=True):
                column.copy_(values)
        if level.depth < self.base_depth:
            return Chosen(index, self._always.expand_as(index))
        return Chosen(index, (max_depth > level.depth)[:, None].expand_as(index))

    def rank(self, pool: Pool) -> Ranking:
        return Ranking(pool.joint_logp, limit=self.planned_tokens(len(pool.parent)))

    def planned_tokens(self, num_rows: int) -> Tensor:
        return self._plan[2, :num_rows]

    def bins(self, num_rows: int) -> Tensor:
        return self._plan[0, :num_rows]


class GateDecider(StaticDecider):
    """ECHO: a level whose likeliest path is unlikely is the last one, and is widened."""

    params: PolicyBuffer

    def __init__(
        self, rule: ShapeRule, record: SparseGates, params: PolicyBuffer, slots: int
    ) -> None:
        super().__init__(rule, params.storage.device)
        self.params, self.num_best = params, record.max_width
        self.check_levels = record.gate_levels
        capacity, device = Geometry.of(rule).capacity, params.storage.device
        self._state = new_gate_state(slots, capacity, device)

    def decide(self, level: Grown) -> Chosen:
        rows, width = len(level.best.index), min(self.width, level.best.index.shape[1])
        state = self._rows(rows)
        keep = close_gates(self.params, level.best, state, depth=level.depth, width=width)
        return Chosen(level.best.index[:, :width], keep)

    def rank(self, pool: Pool) -> Ranking:
        return Ranking(self._rows(len(pool.parent)).order)

    def stopped_at(self, num_rows: int) -> Tensor:
        return self._state.stopped_at[:num_rows]

    def _rows(self, num_rows: int) -> GateState:
        return GateState(*(part[:num_rows] for part in self._state))


class PruneDecider(StaticDecider):
    """C2T and the joint threshold: drops nodes that no score reaches."""

    params: PolicyBuffer

    def __init__(self, rule: ShapeRule, params: PolicyBuffer, slots: int) -> None:
        super().__init__(rule, params.storage.device)
        capacity, device = Geometry.of(rule).capacity, params.storage.device
        self.params, self.check_levels = params, tuple(range(1, rule.max_depth))
        self._scores = torch.zeros(slots, capacity, device=device)
        self._of_parent = torch.zeros(slots, self.width, device=device)
        self._faulty = torch.zeros(slots, dtype=torch.bool, device=device)

    def begin(self, num_rows: int) -> None:
        self._scores[:num_rows].fill_(-math.inf)  # levels that are not drafted
        self._faulty[:num_rows].zero_()

    def decide(self, level: Grown) -> Chosen:
        rows = len(level.best.index)
        above = None if level.depth == 1 else self._of_parent[:rows, : level.num_parents]
        found = prune_level(
            self.params,
            level.pool,
            self._scores[:rows],
            above,
            start=level.start,
            depth=level.depth,
            width=level.best.index.shape[1],
        )
        self._of_parent[:rows, : found.score.shape[1]].copy_(found.score)
        self._faulty[:rows].logical_or_(found.faulty)
        return Chosen(found.index, found.keep)

    def rank(self, pool: Pool) -> Ranking:
        return Ranking(self._scores[: len(pool.parent)], min_score=self.params.min_score)

    def faulty(self, num_rows: int) -> Tensor:
        return self._faulty[:num_rows]


def not_by_kernels(shape: Shape, rule: ShapeRule) -> str | None:
    """The reason why a shape drafts by its torch rule; None if kernels can draft it."""
    if not isinstance(shape, RootOnly | Chain | StaticTree):
        table = table_of(shape)
        if table is None:
            return f"shape {shape.kind} decides by torch rules alone"
        if isinstance(table, PruneTable) and table.own == "given":
            return "its scorer has no kernel"
        if isinstance(table, PruneTable) and table.network and table.network.extra:
            return f"no kernel computes {', '.join(table.network.extra)}"
    geometry = Geometry.of(rule)
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


def decider_of(
    shape: Shape, rule: ShapeRule, num_slots: int, device: torch.device
) -> StaticDecider:
    """The decider of a shape that kernels can draft, and its rule."""
    table = table_of(shape)
    if table is None:
        return StaticDecider(rule, device)
    params = pack(table).to(device)
    if isinstance(shape, EntropyBins):
        return BinDecider(rule, shape, params, num_slots)
    if isinstance(shape, SparseGates):
        return GateDecider(rule, shape, params, num_slots)
    return PruneDecider(rule, params, num_slots)


class DraftBuffers:
    """The drafts of up to S requests at fixed addresses, whoever makes them.

    Attributes:
        pool: columns `[S, P]`. submitted: `[S, N]` int64 pool slots, ascending, -1 padded; of
            rows without a request, none. faulty: `[S]` bool, rows decided by NaN.
    """

    def __init__(self, rule: ShapeRule, num_slots: int, device: torch.device) -> None:
        capacity = Geometry.of(rule).capacity
        integers = torch.zeros(4, num_slots, capacity, dtype=torch.int64, device=device)
        floats = torch.zeros(5, num_slots, capacity, device=device)
        expanded = torch.zeros(num_slots, capacity, dtype=torch.bool, device=device)
        token_ids, parent, depth, rank = integers
        *four, path_entropy = floats
        self.pool = Pool(token_ids, parent, depth, *four, rank, expanded, path_entropy)  # type: ignore[call-arg]
        self.submitted = torch.full((num_slots, rule.max_tokens), -1, device=device)
        self.faulty = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def rows(self, num_rows: int) -> Pool:
        """The pool of the first rows."""
        return Pool(*(column[:num_rows] for column in self.pool))

    def submit(self, chosen: Tensor) -> None:
        """Keeps what the first rows submit, `[B, N']`; the others submit nothing."""
        self.submitted.fill_(-1)
        self.submitted[: len(chosen), : chosen.shape[1]] = chosen

    def take(self, pool: Pool, submitted: Tensor) -> None:
        """Copies a draft that was made elsewhere."""
        rows, size = pool.parent.shape
        self.pool.parent.fill_(PAD)
        for own, column in zip(self.pool, pool, strict=True):
            own[:rows, :size] = column
        self.faulty.fill_(False)
        self.submit(submitted)


class KernelDrafting:
    """Grows trees of up to S requests by kernels, over buffers that stay where they are.

    Attributes:
        report: `[2]` int64 for the host where drafting may stop: nodes that would be expanded
            next, and nodes that the batch will verify at most, -1 where that is not known yet.
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
        # A level reads what the level before sees, so each is written beside the other.
        self._opened = opened, opened._replace(words=torch.zeros_like(opened.words))
        self.report = torch.zeros(2, dtype=torch.int64, device=device)

    def whole(self, state: Rows) -> None:
        """All levels, then the shape's own choice."""
        for depth in range(1, self.rule.max_depth + 1):
            self.level(depth, state)
        self.select(state)

    def level(self, depth: int, state: Rows) -> None:
        """Drafts a level, decides on it and opens the next."""
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
        grown = Grown(written(pool, geometry.starts[depth]), best, start, depth, width)
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
            self._tell(depth, state)

    def select(self, state: Rows) -> None:
        """The shape's choice of what to verify; where a row's is NaN, the likeliest nodes."""
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

    def _tell(self, depth: int, state: Rows) -> None:
        """Fills the report, by `fill_` and `copy_`: a number assigned to an element would be a
        blocking copy from the host, which no graph can hold."""
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
        found = node_features(logits, self.rule.top_k, ENTROPY_TOP_K)
        token_ids = self.drafter.to_target_ids(found.top_ids)
        return Children(token_ids, found.top_logp, found.entropy, found.topk_entropy)
