"""From a shape's record to the parameter buffer that the decision kernels read.

    buffer = pack(table_of(shape)).to(device)        # once, before graphs are captured
    if (why := recapture_reason(old, new)) is None:
        buffer.write(pack(table_of(new)))            # between two rounds, no new capture

Families that are not here (adaptive stops of chains, DDD, OPT-Tree) decide by their torch rules.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from specctl.features import check_registered
from specctl.kernels.policy_eval.layout import (
    BinTable,
    Combine,
    GateTable,
    Layout,
    Network,
    PruneTable,
    Table,
    layout_of,
)
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
from specctl.policy.scorers import folded_layer
from specctl.policy.threshold import lowest_logp


@dataclass(frozen=True)
class Capture:
    """What the graphs of a shape are captured for; all else of it is in the buffer.

    Attributes:
        layout: of the buffer, None for a family that decides by its torch rule.
        max_depth: levels at most. top_k: children per expanded node. width: nodes expanded a level.
        max_tokens: nodes submitted at most, root counted. base_depth: level after which bins are
            chosen, 0 for shapes without.
    """

    kind: str
    layout: Layout | None
    max_depth: int
    top_k: int
    width: int
    max_tokens: int
    base_depth: int


def table_of(shape: Shape) -> Table | None:
    """The arrays of a shape, or None where no decision kernel is its own.

    Thresholds are those of the torch rule, rounded down to float32 as there.
    """
    if isinstance(shape, EntropyBins):
        return BinTable(
            edges=shape.edges,
            depths=shape.plan_depths,
            tokens=shape.plan_tokens,
            first_depth=shape.base.depth,
            conditional=shape.path == "conditional",
        )
    if isinstance(shape, SparseGates):
        bars = map(log_threshold, shape.thresholds)
        return GateTable(dict(zip(shape.gate_levels, bars, strict=True)), shape.reached_depth)
    if isinstance(shape, JointThreshold):
        return PruneTable(lowest_logp(shape.min_prob))
    if isinstance(shape, ScoredTree):
        return _scored(shape)
    return None


def capture_of(shape: Shape) -> Capture:
    """What stays fixed while graphs of this shape live."""
    rule, table = build_shape(shape), table_of(shape)
    layout = layout_of(table) if table else None
    base_depth = shape.base.depth if isinstance(shape, EntropyBins) else 0
    sizes = rule.max_depth, rule.top_k, rule.width, rule.max_tokens
    return Capture(shape.kind, layout, *sizes, base_depth)


def recapture_reason(old: Shape, new: Shape) -> str | None:
    """Why a buffer and the graphs of `old` cannot serve `new`; None if they can.

    Bins may plan less than was captured: depth and size are numbers of the buffer there.
    """
    before, after = asdict(capture_of(old)), asdict(capture_of(new))
    if after["layout"] is None and old != new:
        return f"{new.kind} has no parameter buffer"
    for name, value in after.items():
        may_shrink = new.kind == "hetero" and name in ("max_depth", "max_tokens")
        if value != before[name] and not (may_shrink and value < before[name]):
            return f"{name} changes from {before[name]} to {value}"
    return None


def _scored(shape: ScoredTree) -> PruneTable:
    scorer = shape.scorer
    check_registered(scorer.features)
    combine: Combine = "min" if shape.running_min else "none"
    network = _network(scorer) if isinstance(scorer, FfnScorer) else None
    return PruneTable(
        min_score=lowest_logp(shape.beta),
        own="network" if network else "given",
        combine="add" if shape.predicts == "conditional" else combine,
        keep_leaves=shape.keep_leaves,
        network=network,
    )


def _network(scorer: FfnScorer) -> Network:
    w1, b1 = folded_layer(scorer)
    return Network(scorer.features, w1, b1, np.array(scorer.w2, np.float32), scorer.b2[0])
