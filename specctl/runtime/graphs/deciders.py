"""What a shape decides while its tree grows, on the device: the kernels' side of `policy/`.

The torch rules of `specctl.policy` are the specification; `tests/kernels/rounds.py`
holds both to the same rounds. All parameters of a family that has some stand in one buffer.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specctl.kernels.policy_eval import (
    GateState,
    choose_bins,
    close_gates,
    new_gate_state,
    prune_level,
)
from specctl.kernels.policy_eval.layout import PolicyBuffer, PruneTable, pack
from specctl.kernels.tree_build import Best, Pool
from specctl.policy import Chain, EntropyBins, RootOnly, Shape, SparseGates, StaticTree
from specctl.policy.rules import ShapeRule
from specctl.runtime.policy_buffer import table_of

STATIC = (RootOnly, Chain, StaticTree)


class Grown(NamedTuple):
    """One drafted level of B rows.

    Attributes:
        pool: written up to this level. best: of the level, best first.
        start: first slot of the level. depth: of it. num_parents: nodes it was drafted below.
    """

    pool: Pool
    best: Best
    start: int
    depth: int
    num_parents: int


class Chosen(NamedTuple):
    """The next frontier: `[B, W]` int64 pool slots and `[B, W]` bool, whether to expand; rows
    without a request are left out by who opens it."""

    slots: Tensor
    keep: Tensor


class Ranking(NamedTuple):
    """What is submitted: the nodes of highest score, `limit` `[B]` of a row at most, none below
    `min_score` `[1]`; `scores` is `[B, P]` float32."""

    scores: Tensor
    limit: Tensor | None = None
    min_score: Tensor | None = None


class Decider(Protocol):
    """Decides for rows 0 .. B - 1 of its buffers.

    Attributes:
        num_best: candidates of a level that it wants to see.
        params: what it decides by; None for a shape that is known beforehand.
        check_levels: levels behind which every row may have stopped, or known what it verifies.
    """

    @property
    def num_best(self) -> int: ...
    @property
    def params(self) -> PolicyBuffer | None: ...
    @property
    def check_levels(self) -> tuple[int, ...]: ...

    def begin(self, num_rows: int) -> None:
        """A round starts; called on the device's time, with the first level."""
        ...

    def decide(self, level: Grown) -> Chosen:
        """After every level, the deepest too."""
        ...

    def rank(self, pool: Pool) -> Ranking:
        """After the last level drafted; the pool is whole, with empty slots at deeper levels."""
        ...

    def planned_tokens(self, num_rows: int) -> Tensor | None:
        """`[B]` nodes that rows will verify at most, where that is known before the end."""
        ...

    def bins(self, num_rows: int) -> Tensor | None:
        """`[B]` the regime of each row, for who records it."""
        ...

    def stopped_at(self, num_rows: int) -> Tensor | None:
        """`[B]` the level whose gate closed, for budgets."""
        ...

    def faulty(self, num_rows: int) -> Tensor | None:
        """`[B]` bool: something decided by was NaN."""
        ...


class StaticDecider:
    """EAGLE-2's frontier and rerank; the others differ from it in what they say."""

    params: PolicyBuffer | None = None
    check_levels: tuple[int, ...] = ()

    def __init__(self, rule: ShapeRule, device: torch.device) -> None:
        self.width = self.num_best = max(1, rule.width)
        self._always = torch.ones(1, 1, dtype=torch.bool, device=device)

    def begin(self, num_rows: int) -> None:
        pass

    def decide(self, level: Grown) -> Chosen:
        index = level.best.index
        return Chosen(index, self._always.expand_as(index))

    def rank(self, pool: Pool) -> Ranking:
        return Ranking(pool.joint_logp)

    def planned_tokens(self, num_rows: int) -> Tensor | None:
        del num_rows
        return None

    bins = stopped_at = faulty = planned_tokens


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
        self, rule: ShapeRule, record: SparseGates, params: PolicyBuffer, slots: int, capacity: int
    ) -> None:
        super().__init__(rule, params.storage.device)
        self.params, self.num_best = params, record.max_width
        self.check_levels = record.gate_levels
        self._state = new_gate_state(slots, capacity, params.storage.device)

    def decide(self, level: Grown) -> Chosen:
        width = min(self.width, level.best.index.shape[1])
        keep = close_gates(
            self.params,
            level.best,
            self._rows(len(level.best.index)),
            depth=level.depth,
            width=width,
        )
        return Chosen(level.best.index[:, :width], keep)

    def rank(self, pool: Pool) -> Ranking:
        return Ranking(self._rows(len(pool.parent)).order)

    def stopped_at(self, num_rows: int) -> Tensor:
        return self._state.stopped_at[:num_rows]

    def _rows(self, num_rows: int) -> GateState:
        return GateState(*(part[:num_rows] for part in self._state))


class PruneDecider(StaticDecider):
    """C2T and the joint threshold: what no score reaches is neither expanded nor verified."""

    params: PolicyBuffer

    def __init__(self, rule: ShapeRule, params: PolicyBuffer, slots: int, capacity: int) -> None:
        super().__init__(rule, params.storage.device)
        device = params.storage.device
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


def unsupported_shape(shape: Shape) -> str | None:
    """Why a shape has no decider; None if it has one."""
    if isinstance(shape, STATIC):
        return None
    table = table_of(shape)
    if table is None:
        return f"shape {shape.kind} decides by torch rules alone"
    if isinstance(table, PruneTable) and table.own == "given":
        return "its scorer has no kernel"
    if isinstance(table, PruneTable) and table.network and table.network.extra:
        return f"no kernel computes {', '.join(table.network.extra)}"
    return None


def build_decider(
    shape: Shape, rule: ShapeRule, num_slots: int, capacity: int, device: torch.device
) -> Decider:
    """The decider of a shape that is supported.

    Args:
        rule: of the same shape. capacity: slots of the pool.
    """
    table = table_of(shape)
    if table is None:
        return StaticDecider(rule, device)
    params = pack(table).to(device)
    if isinstance(shape, EntropyBins):
        return BinDecider(rule, shape, params, num_slots)
    if isinstance(shape, SparseGates):
        return GateDecider(rule, shape, params, num_slots, capacity)
    return PruneDecider(rule, params, num_slots, capacity)
