"""Cases of what a policy learned: Φ, features or gates on every threshold and one float beside it.

Networks add float32 numbers in an order of the machine's own. Their scores are compared within
`tolerance`, and whether a node is kept only where its score is further than that from the border.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.policy.gates import log_threshold, stop_levels
from specctl.policy.hetero import entropy_bins_shape
from specctl.policy.records import EntropyBins, FfnScorer, Policy, ScoredTree, Scorer, SparseGates
from specctl.policy.scoring import build_log_odds, folded_layer
from specctl.policy.threshold import lowest_logp

Floats = NDArray[np.float32]
Outputs = dict[str, NDArray[Any]]
MAX_SPLITS = 96
"""Of boosted trees, evenly chosen: each is six rows."""
EXTREME = np.float32(1e6)
UNDECIDED = -1
"""`keep` of a row whose score lies too near the border to be compared."""


class Cases(Protocol):
    """How one kind of record is asked."""

    def inputs(self) -> Floats:
        """`[n, ...]` float32, a function of the record alone."""
        ...

    def outputs(self, inputs: Floats) -> Outputs:
        """What the record's own rule decides, by name, `[n]` each: `scores` float32, else int64."""
        ...


def cases_of(policy: Policy) -> Cases | None:
    """The cases of a policy's shape; None where it learned nothing that has inputs."""
    shape = policy.shape
    kinds: dict[type[Any], Any] = {
        EntropyBins: BinCases,
        SparseGates: GateCases,
        ScoredTree: ScoreCases,
    }
    kind = kinds.get(type(shape))
    found: Cases | None = kind(shape) if kind else None
    return found


@dataclass(frozen=True)
class BinCases:
    """Φ `[n]`, nats, of HeteroSpec's bins."""

    shape: EntropyBins

    def inputs(self) -> Floats:
        edges = np.array(self.shape.edges, np.float32)
        middles = (edges[1:] + edges[:-1]) / 2
        return allowed(np.concatenate([around(edges), middles, [0.0, EXTREME, -EXTREME]]))

    def outputs(self, inputs: Floats) -> Outputs:
        rule = entropy_bins_shape(self.shape, torch.device("cpu"))
        bins = rule.bin_of(torch.from_numpy(inputs))
        tables = {"bin": bins, "depth": rule.bin_depths[bins], "num_tokens": rule.bin_tokens[bins]}
        return {name: table.numpy() for name, table in tables.items()}


@dataclass(frozen=True)
class GateCases:
    """Log-probabilities `[n, G]`, nats, of the likeliest path to each gate."""

    shape: SparseGates

    def inputs(self) -> Floats:
        bars = np.array([log_threshold(p) for p in self.shape.thresholds], np.float32)
        bars = np.maximum(bars, np.float32(-50.0))  # a bar at probability 0 is -inf
        own = [
            np.where(np.arange(len(bars)) == gate, value, np.float32(0))
            for gate, values in enumerate(around(bars).reshape(3, -1).T)
            for value in values
        ]
        return allowed(np.stack([np.zeros_like(bars), np.full_like(bars, -EXTREME), bars, *own]))

    def outputs(self, inputs: Floats) -> Outputs:
        return {"stopped_at": stop_levels(self.shape, torch.from_numpy(inputs)).numpy()}


@dataclass(frozen=True)
class ScoreCases:
    """Features `[n, F]` of nodes; the score itself is compared by `scores`."""

    shape: ScoredTree

    def inputs(self) -> Floats:
        scorer = self.shape.scorer
        rows = network_rows(scorer) if isinstance(scorer, FfnScorer) else split_rows(scorer)
        return allowed(rows)

    def outputs(self, inputs: Floats) -> Outputs:
        found = self.scores(inputs)
        keep = np.where(self.doubtful(found, inputs), UNDECIDED, self._above_bar(found) >= 0)
        return {"scores": found, "keep": keep.astype(np.int64)}

    def doubtful(self, scores: Floats, inputs: Floats, *, machines: int = 1) -> NDArray[np.bool_]:
        """`[n]`: rows that rounding could take to the other side of the border.

        Args:
            machines: 2 where the score of another machine, itself so far from this one, decides.
        """
        bar = lowest_logp(self.shape.beta)
        rounding = tolerance(self.shape.scorer, inputs) + 1e-6 * (1 + abs(bar))
        return np.abs(self._above_bar(scores)) <= machines * rounding

    def _above_bar(self, scores: Floats) -> NDArray[np.float64]:
        """`[n]` nats: log-probabilities over the least that is kept."""
        with np.errstate(invalid="ignore"):  # scores that are no numbers are refused as such
            return -np.logaddexp(0.0, -scores.astype(np.float64)) - lowest_logp(self.shape.beta)

    def scores(self, inputs: Floats) -> Floats:
        """`[n]` float32 log-odds."""
        found: Floats = build_log_odds(self.shape.scorer)(torch.from_numpy(inputs)).numpy()
        return found


def network_rows(scorer: FfnScorer) -> Floats:
    """The mean of the features, each moved by itself and all of them together, `[n, F]`."""
    mean, scale = np.array(scorer.mean), np.array(scorer.scale)
    steps = [-8, -3, -1, -0.5, 0.5, 1, 3, 8]
    alone = [mean + step * scale * one for one in np.eye(len(mean)) for step in steps]
    return np.array([mean, *alone, *(mean + step * scale for step in steps)], np.float32)


def split_rows(scorer: Any) -> Floats:
    """Rows on some splits and beside them, the other features far on one side, `[n, F]`."""
    splits = [i for i, feature in enumerate(scorer.feature) if feature >= 0]
    chosen = splits[:: max(1, -(-len(splits) // MAX_SPLITS))]
    width, rows = len(scorer.features), []
    for node in chosen:
        for value in around(np.array([scorer.threshold[node]], np.float32)):
            for others in (-EXTREME, EXTREME):
                row = np.full(width, others, np.float32)
                row[scorer.feature[node]] = value
                rows.append(row)
    sides = [np.full(width, value, np.float32) for value in (-EXTREME, 0, EXTREME)]
    return np.stack([*sides, *rows])


def tolerance(scorer: Scorer, inputs: Floats) -> NDArray[np.float64]:
    """`[n]` nats: how far two orders of adding float32 numbers may lie apart.

    Every addition may round by half a unit of what was summed, so terms · 2^-23 · Σ|terms|.
    """
    unit = 2.0**-23
    if not isinstance(scorer, FfnScorer):
        largest = np.abs(np.array(scorer.value)).max()
        size = len(scorer.roots)
        return np.full(len(inputs), unit * size * size * largest)
    w1, b1 = (np.abs(table.astype(np.float64)) for table in folded_layer(scorer))
    hidden = np.abs(inputs.astype(np.float64)) @ w1 + b1
    total = hidden @ np.abs(np.array(scorer.w2)) + abs(scorer.b2[0])
    found: NDArray[np.float64] = unit * (len(w1) + len(b1) + 4) * total
    return found


def around(values: Floats) -> Floats:
    """Each value, the float32 below and the one above, `[3 n]`."""
    sides = [np.nextafter(values, np.float32(side)) for side in (-np.inf, np.inf)]
    return np.concatenate([values, *sides])


def allowed(values: NDArray[Any]) -> Floats:
    """Without denormal numbers, which no artifact holds: 0 stands for them."""
    values = np.clip(values, -1e30, 1e30).astype(np.float32)
    small = np.abs(values) < np.finfo(np.float32).tiny
    found: Floats = np.where(small, np.float32(0), values)
    return found
