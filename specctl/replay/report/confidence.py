"""How well confidence tells accepted from rejected, depth by depth (ECHO's figure 2).

Two signals of the drafter: the joint probability of every drafted node, and the *layer
confidence* of a round, the largest joint probability among the nodes of a depth (arXiv:2604.09603,
Eq. 6), which ECHO gates on. Both are counted in fixed bins a prompt, so one pass and constant
memory do, and intervals resample prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specctl.logs.positions import Floats
from specctl.replay.report.rows import ACCEPTED, UNKNOWN, NodeBlock
from specctl.stats import Interval, Resamples, auc

SHOWN_WIDTH = 0.02
NUM_FINE = 30
EDGES = np.concatenate(
    [[0.0], SHOWN_WIDTH * 2.0 ** (np.arange(1 - NUM_FINE, 0) / 2), np.linspace(SHOWN_WIDTH, 1, 99)]
)
"""Bounds of the bins: steps of 0.01, and below 0.02, where most nodes of a tree lie, of a factor
of sqrt(2) down to 8.6e-7. Bin b holds EDGES[b] <= p < EDGES[b + 1], the last one also 1."""
NUM_BINS = len(EDGES) - 1


@dataclass(frozen=True)
class Separation:
    """One depth of one signal.

    Attributes:
        num_accepted, num_rejected: nodes, or rounds for the layer. num_unknown: left out.
        auc: probability that an accepted one is more confident than a rejected one, ties half.
        auc_resolution: the bins can move `auc` by at most this.
        accepted, rejected: counts in `EDGES`.
    """

    depth: int
    num_accepted: int
    num_rejected: int
    num_unknown: int
    auc: Interval
    auc_resolution: float
    accepted: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class Confidence:
    """Both signals, depth by depth."""

    nodes: tuple[Separation, ...]
    layers: tuple[Separation, ...]


class Counts:
    """What one pass leaves behind: P prompts, D depths.

    Attributes:
        table: `[P, D, 2, bins]` int32, accepted and rejected ones. unknown: `[D]` int64.
    """

    def __init__(self, num_prompts: int, depth: int) -> None:
        self.table = np.zeros((num_prompts, depth, 2, NUM_BINS), np.int32)
        self.unknown = np.zeros(depth, np.int64)

    def add(self, prompt: Any, depth: Any, joint_logp: Any, fate: Any) -> None:
        """Counts rows; those of depth 0, the roots, are no drafts."""
        unknown = (depth > 0) & (fate == UNKNOWN)
        self.unknown += np.bincount(depth[unknown] - 1, minlength=len(self.unknown))
        known = (depth > 0) & (fate != UNKNOWN)
        prompts, place = np.unique(prompt[known], return_inverse=True)
        shape = (len(prompts), *self.table.shape[1:])
        index = (place, depth[known] - 1, 1 - fate[known], bins_of(joint_logp[known]))
        counted = np.bincount(np.ravel_multi_index(index, shape), minlength=int(np.prod(shape)))
        self.table[prompts] += counted.reshape(shape).astype(np.int32)

    def separations(self, resamples: Resamples) -> tuple[Separation, ...]:
        """Depth by depth."""
        return tuple(
            _separation(d, self.table[:, d - 1], int(num), resamples)
            for d, num in enumerate(self.unknown, start=1)
        )


def count_confidence(
    blocks: Iterable[NodeBlock], num_prompts: int, depth: int, resamples: Resamples
) -> Confidence:
    """One pass over the nodes."""
    nodes, layers = Counts(num_prompts, depth), Counts(num_prompts, depth)
    for block in blocks:
        nodes.add(block.prompt, block.depth, block.joint_logp, block.fate)
        best = best_of_layers(block)
        layers.add(best.prompt, best.depth, best.joint_logp, best.fate)
    return Confidence(nodes.separations(resamples), layers.separations(resamples))


def best_of_layers(block: NodeBlock) -> NodeBlock:
    """One row a level of a tree: its best joint probability, and whether the path reached it."""
    first = np.flatnonzero(np.diff(block.depth, prepend=-1))
    found = np.maximum.reduceat(block.fate, first)
    unknown = np.minimum.reduceat(block.fate, first) == UNKNOWN
    fate = np.where((found != ACCEPTED) & unknown, UNKNOWN, found)
    best = np.maximum.reduceat(block.joint_logp, first)
    return NodeBlock(block.prompt[first], block.depth[first], best, fate)


def bins_of(joint_logp: Any) -> Any:
    """Bin of each log-probability."""
    prob = np.exp(joint_logp.astype(np.float64))
    return np.clip(np.searchsorted(EDGES, prob, side="right") - 1, 0, NUM_BINS - 1)


def _separation(depth: int, counts: Any, num_unknown: int, resamples: Resamples) -> Separation:
    """Of one depth, from its counts `[P, 2, bins]`."""
    accepted, rejected = counts.sum(0, dtype=np.int64)
    known = counts.reshape(len(counts), -1).astype(np.float64)
    pairs = float(accepted.sum()) * float(rejected.sum())
    tied = float((accepted.astype(np.float64) * rejected).sum())
    return Separation(
        depth,
        int(accepted.sum()),
        int(rejected.sum()),
        num_unknown,
        resamples.interval(known, lambda sums: auc(*np.split(sums, 2, axis=-1))),
        tied / 2 / pairs if pairs else float("nan"),
        tuple(accepted.tolist()),
        tuple(rejected.tolist()),
    )


def densities(counts: tuple[int, ...]) -> Floats:
    """`[50]` probability density in steps of 0.02, for a figure; nothing but 0 for no counts."""
    values = np.asarray(counts, np.float64)
    shown = np.concatenate(
        [[values[:NUM_FINE].sum()], values[NUM_FINE::2] + values[NUM_FINE + 1 :: 2]]
    )
    return np.asarray(shown / max(1.0, shown.sum()) / SHOWN_WIDTH)
