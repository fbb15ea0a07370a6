"""Decisions inside captured rounds: one decider a kind of kernel, and the parameters of each.

The torch rules are the specification; `tests/kernels/test_policy_eval.py` holds both to the same
rounds. All parameters of a family that has some stand in one buffer, which a reload overwrites.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.features import check_registered
from specctl.kernels.policy_eval import (
    GateState,
    choose_bins,
    close_gates,
    new_gate_state,
    prune_level,
)
from specctl.kernels.policy_eval.layout import (
    BinTable,
    GateTable,
    Network,
    PolicyBuffer,
    PruneTable,
    Table,
    layout_of,
    pack,
)
from specctl.kernels.tree_build import WORD_BITS, Best
from specctl.policy import (
    EntropyBins,
    FfnScorer,
    JointThreshold,
    ScoredTree,
    Shape,
    SparseGates,
    build_shape,
)
from specctl.policy.echo import log_threshold
from specctl.policy.families import shape_family
from specctl.policy.pruning import lowest_logp
from specctl.policy.rules import ShapeRule
from specctl.policy.scorers import folded_layer
from specctl.tree import DraftPool

MAX_SLOTS, MAX_CANDIDATES, MAX_BEST, MAX_TOKENS, MAX_CHILDREN = 4096, 1024, 64, 1024, 32
"""Limits of the kernels: slots of a pool, candidates of a level and how many of them are kept,
nodes of a tree, children of a node."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a growing tree, all known beforehand."""

    widths: tuple[int, ...]  # nodes expanded at each level from 1 on: the root, then the frontier's
    starts: tuple[int, ...]  # first pool slot of each level from 1 on, and the end of the last
    behind: tuple[int, ...]  # nodes evaluated before each level from 1 on; the root is none of them

    @classmethod
    def of(cls, rule: ShapeRule) -> Geometry:
        """The geometry of a rule's trees."""
        widths, starts, behind = [], [1], []
        width, before = 1, 0
        for depth in range(1, rule.max_depth + 1):
            widths.append(width)
            behind.append(before)
            before += width if depth > 1 else 0
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
    """One drafted level of B rows."""

    pool: DraftPool  # written up to this level
    best: Best  # candidates of the level, best first
    start: int  # first slot of the level
    depth: int  # of it
    num_parents: int  # nodes it was drafted below


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

    def rank(self, pool: DraftPool) -> Ranking:
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

    def rank(self, pool: DraftPool) -> Ranking:
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

    def rank(self, pool: DraftPool) -> Ranking:
        return Ranking(self._rows(len(pool.parent)).order)

    def stopped_at(self, num_rows: int) -> Tensor:
        return self._state.stopped_at[:num_rows]

    def _rows(self, num_rows: int) -> GateState:
        return GateState(*(part[:num_rows] for part in self._state))


class PruneDecider(StaticDecider):
    """C2T and the joint threshold: drops nodes that no score reaches."""

    params: PolicyBuffer

    def __init__(self, rule: ShapeRule, record: Shape, params: PolicyBuffer, slots: int) -> None:
        del record
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

    def rank(self, pool: DraftPool) -> Ranking:
        return Ranking(self._scores[: len(pool.parent)], min_score=self.params.min_score)

    def faulty(self, num_rows: int) -> Tensor:
        return self._faulty[:num_rows]


def not_by_kernels(shape: Shape, rule: ShapeRule) -> str | None:
    """The reason why a shape drafts by its torch rule; None if kernels can draft it."""
    if shape_family(shape).kernel != "static":
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
    kernel, table = shape_family(shape).kernel, table_of(shape)
    if kernel is None or table is None:
        return StaticDecider(rule, device)
    return DECIDERS[kernel](rule, shape, pack(table).to(device), num_slots)


DECIDERS: dict[str, Callable[[ShapeRule, Any, PolicyBuffer, int], StaticDecider]] = {
    "bins": BinDecider,
    "gates": GateDecider,
    "pruned": PruneDecider,
}
"""By `ShapeFamily.kernel`."""


# --------------------------------------------------------------------------- parameters
#
# A family with fused kernels keeps its parameters in one buffer, so that the next policy of the
# family needs no new capture:
#
#     buffer = pack(table_of(shape)).to(device)        once, before graphs are captured
#     if recapture_reason(old, new) is None:
#         buffer.write(pack(table_of(new)))            between two rounds


def table_of(shape: Shape) -> Table | None:
    """The arrays of a shape, or None where no decision kernel is its own.

    Thresholds are those of the torch rule, rounded down to float32 as there.
    """
    make = TABLES.get(shape_family(shape).kernel or "")
    return None if make is None else make(shape)


def _bins(shape: EntropyBins) -> BinTable:
    return BinTable(
        edges=shape.edges,
        depths=shape.plan_depths,
        tokens=shape.plan_tokens,
        first_depth=shape.base.depth,
        conditional=shape.path == "conditional",
    )


def _gates(shape: SparseGates) -> GateTable | None:
    if shape.rerank:
        return None  # the kernel's gates come with levels that are filled in order
    bars = map(log_threshold, shape.thresholds)
    return GateTable(dict(zip(shape.gate_levels, bars, strict=True)), shape.reached_depth)


def _pruning(shape: JointThreshold | ScoredTree) -> PruneTable | None:
    if shape.min_level_prob:
        return None  # a level's sum is no parameter of the kernel
    if isinstance(shape, JointThreshold):
        return PruneTable(lowest_logp(shape.min_prob))
    scorer, network = shape.scorer, None
    check_registered(scorer.features)
    if isinstance(scorer, FfnScorer):
        w2, b2 = np.array(scorer.w2, np.float32), scorer.b2[0]
        network = Network(scorer.features, *folded_layer(scorer), w2, b2)
    return PruneTable(
        min_score=lowest_logp(shape.beta),
        own="network" if network else "given",
        combine=shape.combine,
        keep_leaves=shape.keep_leaves,
        network=network,
    )


TABLES: dict[str, Callable[[Any], Table | None]] = {
    "bins": _bins,
    "gates": _gates,
    "pruned": _pruning,
}
"""By `ShapeFamily.kernel`; static trees have no parameters."""


def recapture_reason(old: Shape, new: Shape) -> str | None:
    """The reason why a buffer and the graphs of `old` cannot serve `new`; None if they can.

    Bins may plan less than was captured: depth and size are numbers of the buffer there.
    """
    before, after = _captured_sizes(old), _captured_sizes(new)
    if after["layout"] is None and old != new:
        return f"{new.kind} has no parameter buffer"
    for name, value in after.items():
        may_shrink = new.kind == "hetero" and name in ("max_depth", "max_tokens")
        if value != before[name] and not (may_shrink and value < before[name]):
            return f"{name} changes from {before[name]} to {value}"
    return None


def _captured_sizes(shape: Shape) -> dict[str, Any]:
    """The facts of a shape that its graphs hold fixed; all else of it is in the buffer."""
    rule, table = build_shape(shape), table_of(shape)
    sizes = {name: getattr(rule, name) for name in ("max_depth", "top_k", "width", "max_tokens")}
    base_depth = shape.base.depth if isinstance(shape, EntropyBins) else 0
    layout = layout_of(table) if table else None
    return {"kind": shape.kind, "layout": layout, **sizes, "base_depth": base_depth}
