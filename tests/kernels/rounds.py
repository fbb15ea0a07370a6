"""Whole rounds decided on the device against those of the torch rules."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl.kernels.bookkeeping import Opened
from specctl.policy import (
    EntropyBins,
    FfnScorer,
    JointThreshold,
    ScoredTree,
    Shape,
    SparseGates,
    StaticTree,
    build_shape,
)
from specctl.policy.growing import grow_tree
from specctl.policy.rules import Frontier, Level, ShapeRule, fresh_start
from specctl.runtime.attention import PassTables
from specctl.runtime.deciders import decider_of
from specctl.runtime.device_drafting import DraftBuffers, KernelDrafting
from specctl.runtime.requests import Sampling, Stopwatch
from specctl.runtime.state import Rows, SlotFacts, SlotState
from specctl.tree import Children
from specctl.tree import Children as DraftedChildren
from tests.kernels.drawn import BASE, drawn_children
from tests.kernels.helpers import poisoned
from tests.policy.scorers import SCORED, random_network


@dataclass
class GivenChildren:
    """A source that gives the same at every call: the children of level d are those of index d."""

    levels: list[DraftedChildren]
    asked: int = 0

    def children(self, level: Level, frontier: Frontier, top_k: int) -> Children:
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

    submitted: list[list[tuple[int, int]]]
    bins: list[int] | None = None
    stopped_at: list[int] | None = None


def by_rule(shape: Shape, levels: list[DraftedChildren], rows: int) -> Decided:
    """A round by the torch rule."""
    rule = build_shape(shape)
    plan = rule.begin(fresh_start(rows, rule.memory_size))
    pool = grow_tree(rule, plan, GivenChildren(levels), torch.full((rows,), 7), Stopwatch())
    depth = pool.depth[0].tolist()
    starts = [depth.index(level) for level in range(1, depth[-1] + 1)]
    submitted = _nodes(rule.select(plan, pool), starts)
    told = (None if part is None else part.tolist() for part in (plan.bins, plan.stopped_at))
    return Decided(submitted, *told)


def by_kernels(
    shape: Shape, levels: list[DraftedChildren], rows: int, device: torch.device
) -> Decided:
    """The same round as it is played on the device: all levels, nothing asked by the host."""
    rule = build_shape(shape, device)
    decider = decider_of(shape, rule, rows, device)
    buffers = DraftBuffers(rule, rows, device)
    drafting = GivenDrafting(rule, decider, None, buffers, PassTables(device), 0)
    drafting.given, state = levels, SlotState(rows, device)
    state.upload([SlotFacts(7, 0, 0, 0, Sampling())] * rows)
    drafting.whole(state.rows(rows))
    assert not bool(buffers.faulty.any())
    told = (decider.bins(rows), decider.stopped_at(rows))
    return Decided(
        _nodes(buffers.submitted, list(drafting.geometry.starts)),
        *(None if part is None else part.tolist() for part in told),
    )


class GivenDrafting(KernelDrafting):
    """Drafts what it is given, instead of asking a drafter."""

    given: list[DraftedChildren]

    def _children(self, depth: int, width: int, opened: Opened, state: Rows) -> DraftedChildren:
        parts, device = self.given[depth - 1], state.root_ids.device
        return DraftedChildren(
            *(None if part is None else part[:, :width].to(device) for part in parts)
        )


def _nodes(submitted: Tensor, starts: list[int]) -> list[list[tuple[int, int]]]:
    """Level and place in it: kernels leave room for the widest level, rules for what is kept."""

    def place(node: int) -> tuple[int, int]:
        level = bisect_right(starts, node)
        return (level, node - starts[level - 1]) if level else (0, 0)

    return [[place(node) for node in row if node >= 0] for row in submitted.tolist()]


def check_round(name: str, device: torch.device, rows: int = 6, seed: int = 0) -> Decided:
    """The rule and the kernels decide the same; returns what."""
    shape = SHAPES[name]
    levels = drawn_levels(build_shape(shape), rows, seed + len(name))
    wanted = by_rule(shape, levels, rows)
    with poisoned():
        found = by_kernels(shape, levels, rows, device)
    assert found == wanted
    return wanted
