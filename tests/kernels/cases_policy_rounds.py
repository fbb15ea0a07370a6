"""Whole rounds decided on the device against those of the torch rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.features import phi
from specctl.kernels.dispatch import forced
from specctl.kernels.policy_eval import (
    Bins,
    choose_bins,
    close_gates,
    prune_level,
)
from specctl.kernels.policy_eval.results import new_gate_state
from specctl.kernels.tree_build import (
    BuiltTree,
    Pool,
    append_level,
    finish_tree,
    written,
)
from specctl.kernels.tree_build import Children as DraftedChildren
from specctl.policy import build_shape
from specctl.policy.records import (
    EntropyBins,
    FfnScorer,
    JointThreshold,
    ScoredTree,
    Shape,
    SparseGates,
    StaticTree,
)
from specctl.policy.rules import Frontier, ShapeRule, fresh_start
from specctl.runtime.growth import Children, PoolBuffers, grow_tree
from specctl.runtime.metrics import Stopwatch
from specctl.runtime.policy_buffer import table_of
from tests.kernels.cases_policy_eval import BASE, buffer_of, draft_pool
from tests.kernels.cases_tree_build import Growth, drawn_children, empty_pool, moved
from tests.kernels.poison import poisoned
from tests.policy.scorers import SCORED, random_network


@dataclass
class GivenChildren:
    """A source that says the same to whoever asks: the children of level d are those of index d."""

    levels: list[DraftedChildren]
    asked: int = 0

    def children(self, pool: PoolBuffers, frontier: Frontier, top_k: int) -> Children:
        given = self.levels[self.asked]
        self.asked += 1
        width = frontier.index.shape[1]
        return Children(*(part[:, :width] for part in given if part is not None))


RISING = FfnScorer(
    features=("draft_logp", "depth"),
    mean=(-1.0, 0.0),
    scale=(1.0, 1.0),
    w1=((1.0, 1.0), (-1.0, -1.0)),
    b1=(0.0, 0.0),
    w2=(1.0, -1.0),
    b2=(-2.0,),
)
"""Scores that grow with depth, so that what a path has lost counts only where it is carried on."""
SHAPES: dict[str, Shape] = {
    "eagle2": StaticTree(depth=4, top_k=4, num_tokens=20),
    "hetero": EntropyBins(base=BASE, edges=(3.0, 4.0), gammas=(0.5, 1.5), alpha=2),
    "hetero conditional": EntropyBins(
        base=BASE, edges=(2.5, 3.5), gammas=(0.6, 1.0), alpha=2, path="conditional"
    ),
    "echo": SparseGates(
        depth=5, width=3, max_width=6, gate_levels=(1, 2, 4), thresholds=(0.4, 0.3, 0.05),
        num_tokens=22,
    ),
    "threshold": JointThreshold(depth=4, top_k=5, min_prob=0.1, num_tokens=24),
    "threshold uncapped": JointThreshold(depth=3, top_k=3, min_prob=0.05),
    **{name: shape for name, shape in SCORED.items() if shape.scorer.kind == "ffn"},
    "c2t capped": SCORED["c2t joint"].model_copy(update={"num_tokens": 57}),
    "c2t rising": ScoredTree(
        scorer=RISING, beta=0.2, depth=4, first_top_k=4, second_top_k=3, num_tokens=36
    ),
    "c2t conditional": ScoredTree(
        scorer=random_network(7), predicts="conditional", beta=0.7, depth=4, first_top_k=4,
        second_top_k=3, num_tokens=30,
    ),
}  # fmt: skip


def drawn_levels(rule: ShapeRule, rows: int, seed: int) -> list[DraftedChildren]:
    """Children of every level, none -inf and all known; half of the rows tie a lot."""
    draw = np.random.default_rng(seed)
    levels = []
    for depth in range(rule.max_depth):
        width = 1 if depth == 0 else rule.width
        drawn = drawn_children(draw, rows, width, rule.top_k)
        logp = drawn.logp.clamp(min=-4).sort(-1, descending=True).values
        levels.append(drawn._replace(logp=logp, known=None))
    return levels


class Decided(NamedTuple):
    """What a round came to; a rule leaves None what it does not know."""

    submitted: list[list[int]]
    bins: list[int] | None = None
    stopped_at: list[int] | None = None


def by_rule(shape: Shape, levels: list[DraftedChildren], rows: int) -> Decided:
    """A round by the torch rule."""
    rule = build_shape(shape)
    plan = rule.begin(fresh_start(rows, rule.memory_size))
    pool = grow_tree(rule, plan, GivenChildren(levels), torch.full((rows,), 7), Stopwatch())
    submitted = _nodes(rule.select(plan, pool))
    told = (None if part is None else part.tolist() for part in (plan.bins, plan.stopped_at))
    return Decided(submitted, *told)


def by_kernels(
    shape: Shape, levels: list[DraftedChildren], rows: int, device: torch.device
) -> Decided:
    """The same round as it is called on the device: all levels, nothing asked by the host."""
    round_ = DeviceRound(shape, rows, device)
    for depth, drafted in enumerate(levels, 1):
        round_.level(depth, drafted)
    built = round_.finish()
    assert torch.equal(built.valid, built.submitted >= 0)
    bins = None if round_.bins is None else round_.bins.bins.tolist()
    gates = isinstance(shape, SparseGates)
    return Decided(
        _nodes(built.submitted), bins, round_.gates.stopped_at.tolist() if gates else None
    )


def _nodes(submitted: Tensor) -> list[list[int]]:
    return [[node for node in row if node >= 0] for row in submitted.tolist()]


class DeviceRound:
    """The calls of a round, in order. Its buffers would be a graph's."""

    def __init__(self, shape: Shape, rows: int, device: torch.device) -> None:
        self.shape, self.rule, self.device = shape, build_shape(shape), device
        size = Growth(rows, self.rule.max_depth, self.rule.width, self.rule.top_k)
        self.pool, self.start = empty_pool(size, device), 1
        self.scores = torch.full((rows, size.capacity), math.nan, device=device)
        self.gates = new_gate_state(rows, size.capacity, device)
        self.params = None if table_of(shape) is None else buffer_of(shape, device)
        self.frontier = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.keep = torch.ones_like(self.frontier).bool()
        self.of_parent: Tensor | None = None
        self.bins: Bins | None = None

    def level(self, depth: int, drafted: DraftedChildren) -> None:
        """One drafted level: written, decided on, and the next frontier."""
        width = self.frontier.shape[1]
        shape = self.shape
        found = (None if part is None else part[:, :width].to(self.device) for part in drafted)
        num_best = shape.max_width if isinstance(shape, SparseGates) else self.rule.width
        best = append_level(
            self.pool,
            *(self.frontier, self.keep, DraftedChildren(*found)),
            start=self.start,
            depth=depth,
            num_best=num_best,
        )
        end = self.start + width * self.rule.top_k
        self.frontier = best.index[:, : self.rule.width]
        self.keep = torch.ones_like(self.frontier).bool()
        if isinstance(shape, EntropyBins):
            self._bins(depth, end)
        elif isinstance(shape, SparseGates):
            assert self.params is not None
            kept = self.frontier.shape[1]
            self.keep = close_gates(self.params, best, self.gates, depth=depth, width=kept)
        elif self.params is not None:
            self._prune(depth, end)
        self.start = end

    def _bins(self, depth: int, end: int) -> None:
        assert self.params is not None
        assert isinstance(self.shape, EntropyBins)
        if depth == self.shape.base.depth:
            self.bins = choose_bins(self.params, written(self.pool, end))
        if self.bins is not None:
            self.keep = (self.bins.max_depth > depth)[:, None].expand_as(self.frontier)

    def _prune(self, depth: int, end: int) -> None:
        assert self.params is not None
        found = prune_level(
            self.params,
            written(self.pool, end),
            self.scores,
            self.of_parent,
            start=self.start,
            depth=depth,
            width=self.rule.width,
        )
        assert not bool(found.faulty.any())
        self.frontier, self.of_parent, self.keep = found.index, found.score, found.keep

    def finish(self) -> BuiltTree:
        """The tree to verify."""
        ranked, limit, min_score = self.pool.joint_logp, None, None
        if self.bins is not None:
            limit = self.bins.num_tokens
        elif isinstance(self.shape, SparseGates):
            ranked = self.gates.order
        elif self.params is not None:
            ranked, min_score = self.scores, self.params.min_score
        return finish_tree(
            written(self.pool, self.start),
            ranked[:, : self.start],
            self.rule.max_tokens,
            self.rule.max_depth,
            limit=limit,
            min_score=min_score,
        )


def check_round(name: str, device: torch.device, rows: int = 6, seed: int = 0) -> Decided:
    """The rule and the kernels decide the same; returns what."""
    shape = SHAPES[name]
    levels = drawn_levels(build_shape(shape), rows, seed + len(name))
    wanted = by_rule(shape, levels, rows)
    with poisoned():
        found = by_kernels(shape, levels, rows, device)
    assert found == wanted
    return wanted


def check_phi(device: torch.device) -> None:
    """Pools with rows of nothing at the end, by joint and by conditional probability."""
    draw = np.random.default_rng(2)
    size = Growth(6, 3, 2, 3)
    for conditional in (False, True):
        pool = empty_pool(size, torch.device("cpu"))
        frontier, keep, start = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1).bool(), 1
        for depth in range(1, 4):
            children = drawn_children(draw, 6, frontier.shape[1], 3)
            with forced("reference"):
                best = append_level(
                    pool, frontier, keep, children, start=start, depth=depth, num_best=2
                )
            start += children.token_ids[0].numel()
            frontier, keep = best.index, torch.from_numpy(draw.random(best.index.shape) < 0.5)
        pool = written(pool, start)
        shape = SHAPES["hetero conditional" if conditional else "hetero"]
        with poisoned():
            found = choose_bins(buffer_of(shape, device), Pool(*moved(pool, device)))
        wanted = phi(draft_pool(pool), conditional=conditional)
        assert torch.equal(found.value.cpu(), wanted)
