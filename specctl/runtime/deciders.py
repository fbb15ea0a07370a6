"""Decisions by kernels inside captured rounds: one decider for each kind of kernel.

The torch rules are the specification; `tests/kernels/test_policy_eval.py` compares both on the same
rounds. A family's parameters are in one buffer, so that its next policy needs no new capture:

    buffer = pack(table_of(shape)).to(device)        once, before graphs are captured
    if recapture_reason(old, new) is None:
        buffer.write(pack(table_of(new)))            between two rounds
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
    COLUMNS,
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
"""Limits of the kernels: slots of a pool, candidates of a level, nodes kept of a level, nodes of a
tree, children of a node."""


@dataclass(frozen=True)
class Geometry:
    """Fixed sizes of a growing tree, by level from 1 on."""

    widths: tuple[int, ...]  # nodes expanded for the level: the root, then the frontier
    starts: tuple[int, ...]  # first pool slot of the level, and the end of the last
    behind: tuple[int, ...]  # nodes evaluated before the level, the root not counted

    @classmethod
    def of(cls, rule: ShapeRule) -> Geometry:
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
        return self.starts[-1]

    @property
    def max_width(self) -> int:
        return max(self.widths, default=1)

    @property
    def num_words(self) -> int:
        """Words of 32 bits for the visibility of a node."""
        last = self.behind[-1] + self.widths[-1] if self.widths else 1
        return -(-last // WORD_BITS)


class Grown(NamedTuple):
    """One drafted level of B rows."""

    pool: DraftPool  # up to this level
    best: Best  # candidates of the level, best first
    start: int  # first slot of the level
    depth: int
    num_parents: int


class Chosen(NamedTuple):
    """The next frontier."""

    slots: Tensor  # `[B, W]` int64, in the pool
    keep: Tensor  # `[B, W]` bool, whether to expand


class Ranking(NamedTuple):
    """Scores of the pool: the best nodes are submitted."""

    scores: Tensor  # `[B, P]` float32
    limit: Tensor | None = None  # `[B]`, nodes submitted at most
    min_score: Tensor | None = None  # `[1]`, lowest score submitted


class StaticDecider:
    """EAGLE-2's frontier and rerank, and the base of other deciders; decides for rows 0 .. B - 1.

    Attributes:
        num_best: candidates of a level that it ranks.
        params: None for a static tree.
        check_levels: levels after which all rows may have stopped, or their sizes are known.
    """

    params: PolicyBuffer | None = None
    check_levels: tuple[int, ...] = ()

    def __init__(self, rule: ShapeRule, device: torch.device) -> None:
        self.width = self.num_best = max(1, rule.width)
        self._always = torch.ones(1, 1, dtype=torch.bool, device=device)

    def begin(self, num_rows: int) -> None:
        """Starts a round."""

    def decide(self, level: Grown) -> Chosen:
        """Chooses the nodes to expand; called after every level, the deepest included."""
        index = level.best.index
        return Chosen(index, self._always.expand_as(index))

    def rank(self, pool: DraftPool) -> Ranking:
        """Ranks the whole pool after the last level; levels not drafted are empty slots."""
        return Ranking(pool.joint_logp)

    def planned_tokens(self, num_rows: int) -> Tensor | None:
        """`[B]`: nodes verified at most, if known before the last level."""

    def stopped_at(self, num_rows: int) -> Tensor | None:
        """`[B]`: the level whose gate closed, for budgets."""

    def faulty(self, num_rows: int) -> Tensor | None:
        """`[B]` bool: a score is NaN."""


class BinDecider(StaticDecider):
    """HeteroSpec: after the base draft the bin of Φ sets depth and size."""

    params: PolicyBuffer

    def __init__(
        self, rule: ShapeRule, record: EntropyBins, params: PolicyBuffer, slots: int
    ) -> None:
        super().__init__(rule, params.storage.device)
        self.params, self.base_depth = params, record.base.depth
        self.check_levels = (record.base.depth,)
        self._plan = torch.zeros(2, slots, dtype=torch.int64, device=params.storage.device)

    def decide(self, level: Grown) -> Chosen:
        index, rows = level.best.index, len(level.best.index)
        max_depth, num_tokens = self._plan[:, :rows]
        if level.depth == self.base_depth:
            found = choose_bins(self.params, level.pool)
            max_depth.copy_(found.max_depth)
            num_tokens.copy_(found.num_tokens)
        if level.depth < self.base_depth:
            return Chosen(index, self._always.expand_as(index))
        return Chosen(index, (max_depth > level.depth)[:, None].expand_as(index))

    def rank(self, pool: DraftPool) -> Ranking:
        return Ranking(pool.joint_logp, limit=self.planned_tokens(len(pool.parent)))

    def planned_tokens(self, num_rows: int) -> Tensor:
        return self._plan[1, :num_rows]


class GateDecider(StaticDecider):
    """ECHO: a level whose likeliest path is unlikely is widened, and is the last."""

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
    """C2T and the joint threshold: drops nodes of low scores."""

    params: PolicyBuffer

    def __init__(self, rule: ShapeRule, _: Shape, params: PolicyBuffer, slots: int) -> None:
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
    """The reason why a shape drafts by its torch rule; None if kernels draft it."""
    kernel = shape_family(shape).kernel
    if kernel != "static" and table_of(shape) is None:
        with_these = " with these parameters" if kernel in KERNELS else ""
        return f"shape {shape.kind} has torch rules only{with_these}"
    geometry = Geometry.of(rule)
    sizes = (
        ("slots of a pool", geometry.capacity, MAX_SLOTS),
        ("candidates of a level", geometry.max_width * rule.top_k, MAX_CANDIDATES),
        ("nodes expanded of a level", geometry.max_width, MAX_BEST),
        ("nodes of a tree", rule.max_tokens, MAX_TOKENS),
        ("children of a node", rule.top_k, MAX_CHILDREN),
    )
    return next(
        (f"{n} {what}, above the kernels' {most}" for what, n, most in sizes if n > most), None
    )


def decider_of(
    shape: Shape, rule: ShapeRule, num_slots: int, device: torch.device
) -> StaticDecider:
    kernel, table = shape_family(shape).kernel, table_of(shape)
    if kernel is None or table is None:
        return StaticDecider(rule, device)
    return KERNELS[kernel][0](rule, shape, pack(table).to(device), num_slots)


# --------------------------------------------------------------------------- parameters


def table_of(shape: Shape) -> Table | None:
    """The parameters of a shape's decision kernel; None if no kernel decides it.

    Thresholds are rounded to float32 as in the torch rule.
    """
    kernel = shape_family(shape).kernel
    return KERNELS[kernel][1](shape) if kernel in KERNELS else None


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
        return None  # the kernel fills the levels in order
    bars = map(log_threshold, shape.thresholds)
    return GateTable(dict(zip(shape.gate_levels, bars, strict=True)), shape.reached_depth)


def _pruning(shape: JointThreshold | ScoredTree) -> PruneTable | None:
    if shape.min_level_prob:
        return None  # a level's sum is no parameter of the kernel
    if isinstance(shape, JointThreshold):
        return PruneTable(lowest_logp(shape.min_prob))
    scorer = shape.scorer
    check_registered(scorer.features)
    if not isinstance(scorer, FfnScorer) or not set(scorer.features) <= set(COLUMNS):
        return None  # a table, or features that the pool does not hold
    w2, b2 = np.array(scorer.w2, np.float32), scorer.b2[0]
    return PruneTable(
        min_score=lowest_logp(shape.beta),
        combine=shape.combine,
        keep_leaves=shape.keep_leaves,
        network=Network(scorer.features, *folded_layer(scorer), w2, b2),
    )


Decider = Callable[[ShapeRule, Any, PolicyBuffer, int], StaticDecider]
KERNELS: dict[str | None, tuple[Decider, Callable[[Any], Table | None]]] = {
    "bins": (BinDecider, _bins),
    "gates": (GateDecider, _gates),
    "pruned": (PruneDecider, _pruning),
}
"""Decider and parameters by `ShapeFamily.kernel`; static trees have no parameters."""


def recapture_reason(old: Shape, new: Shape) -> str | None:
    """The reason why the buffer and graphs of `old` cannot serve `new`; None if they can.

    Bins may plan less than was captured, as the buffer holds their depths and sizes.
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
    rule, table = build_shape(shape), table_of(shape)
    sizes = {name: getattr(rule, name) for name in ("max_depth", "top_k", "width", "max_tokens")}
    base_depth = shape.base.depth if isinstance(shape, EntropyBins) else 0
    layout = layout_of(table) if table else None
    return {"kind": shape.kind, "layout": layout, **sizes, "base_depth": base_depth}
