"""ECHO (arXiv:2604.09603): sparse gates end a tree of fixed width, and a budget shares a batch.

level    1      2      3 (gate)             gate open: on with the default width
kept     W      W      W  or up to W_max    gate closed: this level is widened, none follows

The gate is decided here, `gate_closes`, and in two other forms: inside CUDA graphs, without
`rerank`, by `gate_kernel` of `kernels/policy_eval/fused.py`, which `GateDecider` of
`runtime/deciders.py` calls; and for other programs in the ONNX file of the artifact, written by
`artifacts/onnx_twin.py`. Specctl itself runs no ONNX gates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, model_validator

from specctl.lazy import Device, Tensor, torch
from specctl.policy.budgets import acceptance_logp, check_roots, keep_first
from specctl.policy.family import (
    Budget,
    Depth,
    Family,
    NumTokens,
    Scaled,
    Shape,
    ShapeFamily,
    TopK,
    grid,
    never,
    prunes,
)
from specctl.policy.rules import (
    BaseShape,
    Frontier,
    Level,
    Plan,
    RoundStart,
    best_nodes,
    best_of_level,
    in_pool_order,
    rank_order,
    rows_below,
    stop_rows,
)
from specctl.records import (
    PositiveInt,
    Probability,
    ceil_float32,
    floor_float32,
    increasing,
    require,
)
from specctl.tree import DraftPool, take


class SparseGates(Shape):
    """ECHO's sparse confidence gates (arXiv:2604.09603, section 3.2)."""

    learned: ClassVar = ("thresholds",)
    always_reads: ClassVar = ("joint_prob",)
    kind: Literal["echo"] = "echo"
    depth: Depth = 8  # levels at most; the paper has no cap, our reading adds one
    width: TopK = 3  # W_dflt, nodes kept and expanded per level
    max_width: TopK = 10
    """W_max, nodes kept of a level whose gate closed; children per expanded node."""
    gate_levels: tuple[Depth, ...] = Field(min_length=1)
    """Levels with a gate, 1-based (the paper's d = 0 is level 1)."""
    thresholds: tuple[Annotated[Probability, AfterValidator(ceil_float32)], ...]
    """Joint probability of the level's best node below which its gate closes."""
    num_tokens: NumTokens = 48  # nodes submitted, root counted; levels are filled from the root on
    rerank: bool = False
    """Submit the likeliest of all drafted nodes instead, as EAGLE-2 does: for one request the paper
    ends EAGLE-3's tree by its gates (section C.4)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(len(self.gate_levels) == len(self.thresholds), "one threshold per gate level")
        require(increasing(self.gate_levels), "gate levels must be strictly increasing")
        require(self.gate_levels[-1] <= self.depth, "a gate lies below the deepest level")
        require(self.width <= self.max_width, "width exceeds max_width")
        return self

    @property
    def reached_depth(self) -> int:
        """Levels that fit into `num_tokens`."""
        if self.rerank:
            return self.depth
        return min(self.depth, math.ceil((self.num_tokens - 1) / self.width))

    @property
    def most_tokens(self) -> int:
        """Nodes of a row whose last gate closes at the deepest level, root counted."""
        if self.rerank:
            return 1 + self.max_width + (self.depth - 1) * self.width * self.max_width
        return 1 + (self.reached_depth - 1) * self.width + self.max_width


@dataclass
class GatedPlan(Plan):
    """A plan with the nodes kept so far."""

    kept: list[Tensor] = field(default_factory=list)
    """`[B, W']` int64 pool indices of each level, likeliest first, -1 padded."""
    num_decided: int = 1  # nodes of the decided levels, root counted


@dataclass(kw_only=True)
class SparseGatesShape(BaseShape):
    """Keeps and expands the `width` likeliest nodes a level, until a closed gate widens the last.

    Eq. 5 to 7 and Algorithm 1 with our repairs: d = 0 is the first drafted level, the depth is
    capped, and a capped size fills the levels from the root on, the widened one last.
    """

    max_width: int
    gates: dict[int, float]
    """Log-probability of a level's likeliest node below which its gate closes, by level."""
    rerank: bool = False  # submits the likeliest nodes of all levels

    def begin(self, start: RoundStart) -> Plan:
        plan = super().begin(start)
        never = torch.zeros_like(plan.max_depth)
        return GatedPlan(plan.num_rows, plan.max_depth, stopped_at=never)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        best = self._decide(cast(GatedPlan, plan), level)
        return rows_below(plan, level, best[:, : self.width])

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        if self.rerank:
            return best_nodes(pool, self.max_tokens)
        plan = cast(GatedPlan, plan)
        if plan.num_decided < pool.joint_logp.shape[1]:  # `grow` skips the last level
            self._decide(plan, Level(len(plan.kept) + 1, pool, plan.num_decided))
        kept = torch.cat(plan.kept, 1)
        exists = pool.joint_logp.gather(1, kept.clamp(min=0)) > -math.inf
        exists = exists & (kept >= 0)
        exists = exists & (exists.cumsum(1) < self.max_tokens)
        chosen = torch.nn.functional.pad(kept, (1, 0))  # the root
        exists = torch.nn.functional.pad(exists, (1, 0), value=True)
        return in_pool_order(chosen, exists)[:, : self.max_tokens]

    def _decide(self, plan: GatedPlan, level: Level) -> Tensor:
        """`[B, W']`: the level's likeliest nodes, after its gate; records the kept ones."""
        plan.num_decided = level.pool.joint_logp.shape[1]
        if level.depth not in self.gates:
            best = best_of_level(level, self.width)
            plan.kept.append(best)
            return best
        closed = self._close(plan, level)[:, None]
        best = best_of_level(level, self.max_width)
        spare = torch.arange(best.shape[1], device=best.device) >= self.width
        plan.kept.append(best.masked_fill(spare & ~closed, -1))
        return best

    def _close(self, plan: GatedPlan, level: Level) -> Tensor:
        """`[B]` bool: the gate closes in a row that reaches this level; records it in the plan."""
        assert plan.stopped_at is not None
        confidence = level.joint_logp.amax(1)
        closed = gate_closes(confidence, self.gates[level.depth]) & (confidence > -math.inf)
        plan.stopped_at = torch.where(closed, level.depth, plan.stopped_at)
        stop_rows(plan, level, closed)
        return closed


def sparse_gates_shape(record: SparseGates, device: Device) -> SparseGatesShape:
    gates = dict(zip(record.gate_levels, map(log_threshold, record.thresholds), strict=True))
    most = min(record.num_tokens, record.most_tokens)
    return SparseGatesShape(
        *(record.reached_depth, record.max_width, record.width, most),
        device,
        max_width=record.max_width,
        gates=gates,
        rerank=record.rerank,
    )


def gate_closes(confidence: Tensor, log_bar: float) -> Tensor:
    """Bool: a level's likeliest path is below the bar."""
    return confidence < log_bar


def stop_levels(record: SparseGates, gate_logp: Tensor) -> Tensor:
    """`[n]` int64: level of the first gate that closes, 0 for none.

    Args:
        gate_logp: `[n, G]` float32, nats, of the likeliest path to each gate's level.
    """
    stopped = torch.zeros(len(gate_logp), dtype=torch.int64, device=gate_logp.device)
    for column, level in reversed(list(enumerate(record.gate_levels))):
        closed = gate_closes(gate_logp[:, column], log_threshold(record.thresholds[column]))
        stopped = torch.where(closed, level, stopped)
    return stopped


def log_threshold(prob: float) -> float:
    """Nats, rounded down, so that a probability equal to the threshold passes."""
    return floor_float32(math.log(prob)) if prob > 0 else -math.inf


PAPER = {
    "depth": 8,
    "width": 10,
    "max_width": 10,
    "num_tokens": 60,
    "rerank": True,
    "gate_levels": (1, 4, 6),
    "thresholds": (0.2, 0.35, 0.5),
}
"""One request at a time (section C.4), with the paper's gates for LLaMA-3.1-8B at its depths 0, 3
and 5. `specctl fit echo` fits another pair's."""
BETWEEN = (0.2, 0.25, 0.3, 0.35, 0.425, 0.5, 0.5, 0.5)
"""Bars of a gate at every level, interpolated linearly, as the paper prints none."""
ECHO = ShapeFamily(
    record=SparseGates,
    rule=sparse_gates_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=False,
    is_ranked=never,
    kernel="gates",
    withholds=prunes,
    words={
        "echo": {},
        "echo-paper": PAPER,
        "echo-batch-paper": PAPER | {"width": 3, "rerank": False},
        "echo-fixed": PAPER | {"thresholds": (0.35,) * 3},
        "echo-dense": PAPER | {"gate_levels": tuple(range(1, 9)), "thresholds": BETWEEN},
    },
    fitted_grid=grid(depth="3 4 6 8", width="1 2 3 4", num_tokens="8 16 32 48"),
    shared_fitted_grid=grid(width="1 2 3", depth="4"),
    chain=lambda record: record.model_copy(update={"width": 1, "max_width": 1}),
)


# --------------------------------------------------------------------------- the elastic budget


class ElasticBudget(Budget):
    """ECHO's batch budget (Algorithm 1, repaired: never negative, fair order, root counted)."""

    kind: Literal["echo_budget"] = "echo_budget"
    max_tokens: PositiveInt
    """K_max, nodes verified per round over the batch, roots counted, so at least the batch size."""
    default_width: TopK = 3  # W_dflt, nodes a request gets of a level when it deepens
    max_width: TopK = 10  # W_max, nodes a request gets at a time when it is widened
    order: Literal["confidence", "row"] = "confidence"
    """Order of the requests of a level: by confidence, or by row as in the paper, which starves
    late rows."""


@dataclass(frozen=True)
class ElasticRule:
    """Algorithm 1 with our repairs, as one order of nodes.

    In stage d every deepening request gets its `default_width` likeliest nodes of level d; a gate
    ends this for its request from its own level on. Later stages widen: a request gets the
    likeliest `max_width` of its remaining nodes, stage by stage. Within a stage requests are
    ordered by confidence, the probability of their likeliest node there; ties go to the earlier
    row. The batch verifies its roots and the first `max_tokens - B` nodes of that order. So all
    requests deepen before any is widened, the budget is never exceeded, and a larger budget only
    adds nodes.
    """

    record: ElasticBudget
    max_depth: int | None = None  # of the trees; None reads it from the device

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        tree, score = take(pool, submitted), acceptance_logp(pool, submitted, None)
        slot = rank_order(score)  # likeliest first, so that the root is first
        parent = slot.argsort(1).gather(1, tree.parent.gather(1, slot).clamp(min=0))
        score, depth = score.gather(1, slot), tree.depth.gather(1, slot)
        stage = self._stages(score, depth, parent, plan.stopped_at)
        num_rows = len(slot)
        place = slot * num_rows + torch.arange(num_rows, device=slot.device)[:, None]
        order = place.flatten()[self._order(stage, score)]
        return keep_first(submitted, order[num_rows:], self.record.max_tokens - num_rows)

    def _stages(
        self, score: Tensor, depth: Tensor, parent: Tensor, stopped_at: Tensor | None
    ) -> Tensor:
        """`[B, N]` int64: roots 0, deepening nodes by level, then widening ones, then empty slots.

        Deepening nodes are the `default_width` likeliest of every level above the row's closed gate
        whose parents deepen, so that every prefix is a tree.

        Args:
            score, depth, parent: `[B, N]`, likeliest first; -inf in empty slots; parents as places.
        """
        exists = above = score > -math.inf
        if stopped_at is not None:
            above = above & ((depth < stopped_at[:, None]) | (stopped_at == 0)[:, None])
        deepens = above & (depth == 0)
        deepest = int(depth.max()) if self.max_depth is None else self.max_depth
        for one in range(1, deepest + 1):
            level = above & (depth == one) & deepens.gather(1, parent)
            deepens = deepens | (level & (level.cumsum(1) <= self.record.default_width))
        rest, num_slots = exists & ~deepens, exists.shape[1]  # levels are below `num_slots`
        turn = (rest.cumsum(1) - 1).clamp(min=0) // self.record.max_width
        stage = torch.where(deepens, depth, num_slots + turn)
        return stage.masked_fill(~exists, 2 * num_slots)

    def _order(self, stage: Tensor, score: Tensor) -> Tensor:
        """`[B · N]`: flat places by stage, the row's confidence in it, row, and rank."""
        flat = stage.flatten()
        if self.record.order == "row":
            return flat.sort(stable=True).indices
        best = score.new_full((len(stage), 2 * stage.shape[1] + 1), -math.inf)
        confidence = best.scatter_reduce(1, stage, score, "amax").gather(1, stage).flatten()
        order = confidence.sort(descending=True, stable=True).indices
        return order[flat[order].sort(stable=True).indices]


def elastic_rule(
    record: ElasticBudget, batch_size: int, max_tokens: int, device: Device
) -> ElasticRule:
    del max_tokens, device
    check_roots(record.kind, record.max_tokens, batch_size)
    return ElasticRule(record)


ECHO_BUDGET = Family(
    record=ElasticBudget,
    rule=elastic_rule,
    words={"echo_budget": {}},
    grids={
        "echo_budget": {
            "max_tokens": Scaled((2, 3, 4, 6, 8, 12, 16, 24), "batch size"),
            "default_width": ("1", "2", "3"),
        }
    },
)
