"""Whether scores are probabilities: expected calibration error and reliability, by depth.

Scores are counted in fine bins of log-odds as batches pass, so memory does not grow; equal-mass
bins are made of neighbouring fine ones. Nodes of one position are not independent, so a little
of what chance adds to the error remains.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.policy.records import Record
from specctl.stats import auc, calibration_errors
from specctl.train.nodes import NodeBatch

Floats = NDArray[np.float64]
LOW, HIGH, NUM_CELLS = -16.0, 16.0, 1600
"""Fine bins of log-odds, nats."""
NUM_BINS = 15
"""Equal-mass bins."""


class ReliabilityBin(Record):
    """One equal-mass bin: mean score and share accepted."""

    num_nodes: int
    mean_prob: float
    accepted_frac: float


class DepthCalibration(Record):
    """Calibration at one depth, or at all together where `depth` is none.

    Attributes:
        ece: root of the mean squared gap between score and share accepted over equal-mass
            bins, debiased. ece_plain: mean absolute gap, chance left in.
    """

    depth: int | None
    num_nodes: int
    accepted_frac: float
    ece: float
    ece_plain: float
    bins: tuple[ReliabilityBin, ...]


class CalibrationTally:
    """Counts of known nodes by depth and fine bin of log-odds."""

    def __init__(self, depth: int) -> None:
        self._nodes, self._accepted, self._prob = np.zeros((3, depth + 1, NUM_CELLS))

    def add(self, batch: NodeBatch, log_prob: Tensor) -> None:
        known = batch.known.clone()
        known[:, 0] = False
        row, node = known.nonzero(as_tuple=True)
        logp, accepted = log_prob[row, node].double(), batch.accepted[row, node]
        odds = logp - torch.log(-torch.expm1(logp))
        cell = ((odds - LOW) * (NUM_CELLS / (HIGH - LOW))).clamp(0, NUM_CELLS - 1).long()
        place = batch.pool.tree.depth[row, node] * NUM_CELLS + cell
        for counts, weights in (
            (self._nodes, None),
            (self._accepted, accepted.double()),
            (self._prob, logp.exp()),
        ):
            found = torch.bincount(place, weights, minlength=counts.size)
            counts += found.numpy().reshape(counts.shape)

    def by_depth(self) -> tuple[DepthCalibration, ...]:
        """All depths together, then each that holds nodes."""
        levels = [level for level in range(1, len(self._nodes)) if self._nodes[level].any()]
        whole = self._of(None, slice(1, None))
        return (whole, *(self._of(level, slice(level, level + 1)) for level in levels))

    def _of(self, depth: int | None, levels: slice) -> DepthCalibration:
        nodes, accepted, prob = (
            counts[levels].sum(0) for counts in (self._nodes, self._accepted, self._prob)
        )
        bins = _equal_mass(nodes, accepted, prob)
        debiased, plain = calibration_errors(*bins)
        total = int(nodes.sum())
        return DepthCalibration(
            depth=depth,
            num_nodes=total,
            accepted_frac=float(accepted.sum() / max(1, total)),
            ece=debiased,
            ece_plain=plain,
            bins=tuple(
                ReliabilityBin(num_nodes=int(n), mean_prob=p / n, accepted_frac=a / n)
                for n, a, p in np.stack(bins, 1).tolist()
            ),
        )

    def auc(self) -> float:
        """Probability that an accepted node outscores a rejected one; ties count half."""
        accepted = self._accepted.sum(0)
        return float(auc(accepted, self._nodes.sum(0) - accepted))


def _equal_mass(nodes: Floats, accepted: Floats, prob: Floats) -> tuple[Floats, Floats, Floats]:
    """Neighbouring cells joined to at most `NUM_BINS` bins of about equal size."""
    before = np.cumsum(nodes) - nodes
    bin_of = np.minimum((before * NUM_BINS / max(1.0, nodes.sum())).astype(int), NUM_BINS - 1)
    sums = [np.bincount(bin_of, values, minlength=NUM_BINS) for values in (nodes, accepted, prob)]
    filled = sums[0] > 0
    return sums[0][filled], sums[1][filled], sums[2][filled]
