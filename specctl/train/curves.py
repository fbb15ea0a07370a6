"""Nodes kept by every threshold of a pruned tree, from one pass over a log.

A tree pruned at beta holds the nodes that the same rule, drafting without a threshold, scores at
beta or more: cutting a level at beta commutes with taking its best nodes. So one pass with beta = 0
gives the trees of all thresholds exactly, within the log's support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.errors import TraceEmptyError
from specctl.logs.node_sample import LoggedNodes, NodeBatch, codes_of
from specctl.policy.pruning import lowest_logp
from specctl.policy.rules import ShapeRule
from specctl.records import Record
from specctl.stats import Floats, Interval, Resamples, auc, calibration_errors, sums_by

Counts = NDArray[np.int64]
LOG_ODDS = np.linspace(-9.0, 6.0, 151)
"""The grid of thresholds, nats: probabilities from 0.0001 to 0.998."""
BETAS = tuple((1 / (1 + np.exp(-LOG_ODDS))).tolist())
NUM_RESAMPLES = 1000
"""Resamples of prompts for intervals."""
LOW, HIGH, NUM_CELLS = -16.0, 16.0, 1600
"""Fine bins of log-odds, nats, in which scores are counted."""
NUM_BINS = 15
"""Equal-mass bins of the calibration error, each of neighbouring fine bins."""


class DepthCalibration(Record):
    """Calibration at one depth, or at all together."""

    depth: int | None  # None for all
    num_nodes: int
    accepted_frac: float
    ece: float  # root mean squared gap of score and share accepted over equal-mass bins, debiased
    ece_plain: float  # mean absolute gap, chance left in


class CalibrationTally:
    """Counts of known nodes by depth and fine bin of log-odds."""

    def __init__(self, depth: int) -> None:
        self._counts = np.zeros((3, depth + 1, NUM_CELLS))  # nodes, accepted ones, Σ probability

    def add(self, batch: NodeBatch, log_prob: Tensor) -> None:
        known = batch.known.clone()
        known[:, 0] = False
        row, node = known.nonzero(as_tuple=True)
        logp, accepted = log_prob[row, node].double(), batch.accepted[row, node]
        odds = logp - torch.log(-torch.expm1(logp))
        cell = ((odds - LOW) * (NUM_CELLS / (HIGH - LOW))).clamp(0, NUM_CELLS - 1).long()
        place = batch.pool.depth[row, node] * NUM_CELLS + cell
        for counts, weights in zip(
            self._counts, (None, accepted.double(), logp.exp()), strict=True
        ):
            found = torch.bincount(place, weights, minlength=counts.size)
            counts += found.numpy().reshape(counts.shape)

    def by_depth(self) -> tuple[DepthCalibration, ...]:
        """All depths together, then each depth with nodes."""
        levels: list[int] = np.flatnonzero(self._counts[0].any(1)).tolist()
        return (
            _calibration(None, self._counts[:, 1:].sum(1)),
            *(_calibration(level, self._counts[:, level]) for level in levels),
        )

    def auc(self) -> float:
        """Probability that an accepted node outscores a rejected one; ties count half."""
        nodes, accepted, _ = self._counts.sum(1)
        return float(auc(accepted, nodes - accepted))


def _calibration(depth: int | None, counts: Floats) -> DepthCalibration:
    """Calibration from counts `[3, NUM_CELLS]`."""
    debiased, plain = calibration_errors(*equal_mass(*counts))
    num_nodes, num_accepted, _ = counts.sum(1)
    return DepthCalibration(
        depth=depth,
        num_nodes=int(num_nodes),
        accepted_frac=float(num_accepted / max(1, num_nodes)),
        ece=debiased,
        ece_plain=plain,
    )


def equal_mass(nodes: Floats, accepted: Floats, prob: Floats) -> list[Floats]:
    """Joins neighbouring cells to at most `NUM_BINS` bins of about equal size."""
    before = np.cumsum(nodes) - nodes
    bin_of = np.minimum((before * NUM_BINS / max(1.0, nodes.sum())).astype(int), NUM_BINS - 1)
    sums = sums_by(bin_of, NUM_BINS, np.stack([nodes, accepted, prob], 1))
    return list(sums[sums[:, 0] > 0].T)


class CurvePoint(Record):
    """The nodes that one threshold keeps over all positions."""

    beta: float
    recall: float  # kept accepted nodes of all that the longest logged paths hold
    positive_rate: float  # kept nodes of all that the unpruned tree drafts (the paper's)
    num_tokens: float  # nodes kept per position, root counted
    num_accepted: float  # accepted draft tokens kept per position


@dataclass(frozen=True)
class Curve:
    """Counts of P prompts by G thresholds, int64, roots excluded."""

    betas: tuple[float, ...]  # ascending
    kept: Counts  # [P, G] nodes that reach the g-th threshold
    accepted: Counts  # [P, G] of these
    positions: Counts  # [P]
    longest: Counts  # [P] tokens of the longest accepted paths
    drafted: Counts  # [P] nodes of the unpruned trees
    num_missing: int  # expansions that the log lacks
    calibration: CalibrationTally  # of the scores as probabilities

    @property
    def num_prompts(self) -> int:
        return len(self.kept)

    @property
    def num_positions(self) -> int:
        return int(self.positions.sum())

    @property
    def missing_per_position(self) -> float:
        """Expansions that the log lacks, a position."""
        return self.num_missing / self.num_positions

    def points(self) -> tuple[CurvePoint, ...]:
        """All thresholds that keep something, ascending."""
        keeping = np.flatnonzero(self.kept.sum(0)).tolist()
        return tuple(self.point(index) for index in keeping)

    def point(self, index: int) -> CurvePoint:
        found = self._figures(self._columns(index).sum(0)[None])
        values = {name: float(value[0]) for name, value in found.items()}
        return CurvePoint(beta=self.betas[index], **values)

    def intervals(self, index: int, seed: int) -> dict[str, Interval]:
        """Intervals of a point's figures, by resampling prompts."""
        resamples, point = self.resamples(seed), self.point(index)
        drawn = self._figures(resamples.drawn(self._columns(index))[1:])
        return {
            name: Interval(getattr(point, name), *resamples.bounds(values))
            for name, values in drawn.items()
        }

    def resamples(self, seed: int) -> Resamples:
        """Resamples of the prompts; curves over the same prompts get the same ones."""
        return Resamples.draw(len(self.kept), seed=seed, num=NUM_RESAMPLES)

    def index_of_recall(self, recall: float) -> int | None:
        """The highest threshold that keeps this share of accepted tokens; None if there is none."""
        reached = np.flatnonzero(self.accepted.sum(0) >= recall * self.longest.sum())
        return int(reached[-1]) if len(reached) else None

    def tokens_at_recall(self, recall: float, resamples: Resamples | None = None) -> Floats:
        """`[1 + R]` nodes kept per position, root counted, at a recall: of all prompts, then of
        every resample.

        Interpolates the logarithm linearly between thresholds; NaN if the recall is not reached.
        """
        columns = (self.kept, self.accepted, self.longest[:, None], self.positions[:, None])
        tables = [column.astype(float) for column in columns]
        drawn = [table.sum(0)[None] for table in tables]
        kept, accepted, longest, positions = map(resamples.drawn, tables) if resamples else drawn
        found = np.full(len(kept), np.nan)
        recalls, tokens = accepted / longest, np.log1p(kept / positions)
        for row in range(len(kept)):
            if recalls[row, 0] >= recall:
                at = np.interp(recall, recalls[row, ::-1], tokens[row, ::-1])
                found[row] = math.exp(at)
        return found

    def _columns(self, index: int) -> Floats:
        """`[P, 5]` counts behind a point's figures."""
        at = self.kept[:, index], self.accepted[:, index]
        return np.stack([*at, self.positions, self.longest, self.drafted], 1).astype(float)

    def _figures(self, sums: Floats) -> dict[str, Floats]:
        """Figures of a point from sums `[R, 5]` over prompts."""
        kept, accepted, positions, longest, drafted = sums.T
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "recall": accepted / longest,
                "positive_rate": kept / drafted,
                "num_tokens": 1 + kept / positions,
                "num_accepted": accepted / positions,
            }


def trace_curve(
    source: LoggedNodes,
    rule: ShapeRule,
    prompt_ids: Sequence[str],
    *,
    betas: tuple[float, ...] = BETAS,
) -> Curve:
    """Drafts with a pruning rule that keeps everything, and counts the nodes of each threshold.

    Args:
        rule: the runtime's, with log-probabilities of acceptance as scores.
        betas: ascending probabilities.
    """
    size = len(betas) + 1
    thresholds = torch.tensor([lowest_logp(beta) for beta in betas], dtype=torch.float32)
    calibration, num_missing = CalibrationTally(rule.max_depth), 0
    prompts: dict[str, int] = {}
    # By number of thresholds reached: all nodes, and accepted ones.
    nodes = np.zeros((2, len(prompt_ids), size), np.int64)
    totals = np.zeros((len(prompt_ids), 3), np.int64)
    for batch in source.batches(rule, prompt_ids):
        assert batch.scores is not None, "a pruning rule scores what it drafts"
        calibration.add(batch, batch.scores)
        num_missing += int(batch.num_missing.sum())
        drafted = batch.pool.valid.clone()
        drafted[:, 0] = False
        codes = codes_of(batch.prompt_id, prompts)
        groups, row = np.unique(codes, return_inverse=True)
        reached = torch.bucketize(batch.scores, thresholds, right=True)
        place = torch.from_numpy(row)[:, None] * size + reached
        for counts, chosen in zip(nodes, (drafted, drafted & batch.accepted), strict=True):
            found = torch.bincount(place[chosen], minlength=len(groups) * size)
            counts[groups] += found.view(-1, size).numpy()
        each = torch.stack((torch.ones_like(batch.longest), batch.longest, drafted.sum(1)), 1)
        np.add.at(totals, groups[row], each.numpy())
    if not prompts:
        raise TraceEmptyError("the log holds no positions of these prompts")
    # The first g thresholds keep a node that reached g.
    kept, accepted = np.cumsum(nodes[:, : len(prompts), ::-1], 2)[..., ::-1][..., 1:]
    positions, longest, drafted_nodes = totals[: len(prompts)].T
    return Curve(
        betas=betas,
        kept=kept,
        accepted=accepted,
        positions=positions,
        longest=longest,
        drafted=drafted_nodes,
        num_missing=num_missing,
        calibration=calibration,
    )
