"""Scorers at work: from the features of nodes to the log-odds of their acceptance.

Both are float32 and batched, without a loop over nodes and without asking the device anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.policy.scorers import FfnScorer, Scorer, TreesScorer

BLOCK_ROWS = 256
"""Nodes that are scored by trees together: what is alive of them stays within the cache."""


class LogOdds(Protocol):
    """What a scorer says of nodes."""

    def __call__(self, features: Tensor, /) -> Tensor:
        """`[n, F]` float32 features to `[n]` float32 log-odds of acceptance."""
        ...


def build_log_odds(scorer: Scorer, device: torch.device | str = "cpu") -> LogOdds:
    """The function of a scorer, its tables on `device`."""
    if isinstance(scorer, FfnScorer):
        return ffn_log_odds(scorer, torch.device(device))
    return trees_log_odds(scorer, torch.device(device))


# --------------------------------------------------------------------------- network


@dataclass(frozen=True)
class FfnLogOdds:
    """`w2 · relu(w1 · x + b1) + b2`, the standardisation of x folded into the first layer.

    Attributes:
        w1: `[F, H]`. b1, w2: `[H]`. b2: `[1]`.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        hidden = (
            torch.mm(features, self.w1).add_(self.b1).relu_()
        )  # faster than addmm if this small
        return torch.mv(hidden, self.w2).add_(self.b2)


def ffn_log_odds(scorer: FfnScorer, device: torch.device) -> FfnLogOdds:
    """The network of a record."""
    w1, b1 = folded_layer(scorer)
    tables = (w1, b1, _floats(scorer.w2), _floats(scorer.b2))
    return FfnLogOdds(*(torch.from_numpy(table).to(device) for table in tables))


def folded_layer(scorer: FfnScorer) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The first layer over raw features: `[F, H]` weights and `[H]` biases.

    (x - mean) / scale · w is x · (w / scale) - mean / scale · w; in float64, rounded once.
    """
    weights = np.array(scorer.w1) / np.array(scorer.scale)
    biases = np.array(scorer.b1) - weights @ np.array(scorer.mean)
    return np.ascontiguousarray(weights.T, np.float32), biases.astype(np.float32)


def _floats(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


# --------------------------------------------------------------------------- trees


@dataclass(frozen=True)
class TreesLogOdds:
    """All trees at once, without walking them (QuickScorer, Lucchese et al., SIGIR 2015).

    A split that a node fails (x > threshold) rules out all leaves on its left. Of the leaves that
    no split rules out, the leftmost is the one that a walk would reach. Which leaves of which tree
    a feature's value leaves alive depends only on its place among that feature's thresholds, so it
    is looked up.

    Attributes:
        thresholds: for each feature `[R]` float32, ascending, all trees together.
        alive: for each feature `[R + 1, T]` int64: bit i of `alive[f][r, t]` is set unless one of
            the r lowest thresholds rules out leaf i of tree t.
        first: `[T]` int64, where a tree's leaves begin. value: `[L]` float32.
    """

    thresholds: tuple[Tensor, ...]
    alive: tuple[Tensor, ...]
    first: Tensor
    value: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        blocks = torch.split(features, BLOCK_ROWS)
        return torch.cat([self.value[self.leaves(block)].sum(1) for block in blocks])

    def leaves(self, features: Tensor) -> Tensor:
        """`[n, T]` int64: the leaf of every node in every tree."""
        alive = self.first.new_full((1, 1), -1)
        columns = features.T.contiguous().unbind(0)
        for column, thresholds, table in zip(columns, self.thresholds, self.alive, strict=True):
            alive = alive & table[torch.bucketize(column, thresholds)]
        lowest = (alive & -alive).double()  # a power of two; its exponent is the leaf's place
        return (lowest.view(torch.int64) >> 52) - 1023 + self.first


def trees_log_odds(scorer: TreesScorer, device: torch.device) -> TreesLogOdds:
    """The trees of a record."""
    leaves = [_leaves(scorer, root) for root in scorer.roots]
    splits = _splits(scorer, leaves)
    tables = [_feature_table(splits, f, len(leaves)) for f in range(len(scorer.features))]
    values = _floats([scorer.value[leaf] for tree in leaves for leaf in tree])
    first = np.cumsum([0, *(len(tree) for tree in leaves[:-1])])
    return TreesLogOdds(
        tuple(torch.from_numpy(thresholds).to(device) for thresholds, _ in tables),
        tuple(torch.from_numpy(alive).to(device) for _, alive in tables),
        torch.from_numpy(first.astype(np.int64)).to(device),
        torch.from_numpy(values).to(device),
    )


def _leaves(scorer: TreesScorer, root: int) -> list[int]:
    """A tree's leaves from left to right."""
    found, pending = [], [root]
    while pending:
        node = pending.pop()
        if scorer.feature[node] < 0:
            found.append(node)
        else:
            pending += (scorer.right[node], scorer.left[node])
    return found


class Splits(NamedTuple):
    """All splits of all trees, `[S]` each.

    Attributes:
        feature: int64. threshold: float32. tree: int64.
        ruled_out: int64, bit i is set if leaf i of the tree is on the left.
    """

    feature: NDArray[np.int64]
    threshold: NDArray[np.float32]
    tree: NDArray[np.int64]
    ruled_out: NDArray[np.int64]


def _splits(scorer: TreesScorer, leaves: list[list[int]]) -> Splits:
    """A pass over the nodes each way, as parents stand before their children: trees of strangers
    may be as deep as they have leaves."""
    below, tree = [0] * len(scorer.feature), [0] * len(scorer.feature)
    for number, (root, places) in enumerate(zip(scorer.roots, leaves, strict=True)):
        tree[root] = number
        for place, leaf in enumerate(places):
            below[leaf] = 1 << place
    inner = [node for node, feature in enumerate(scorer.feature) if feature >= 0]
    for node in inner:
        tree[scorer.left[node]] = tree[scorer.right[node]] = tree[node]
    for node in reversed(inner):
        below[node] = below[scorer.left[node]] | below[scorer.right[node]]
    return Splits(
        np.array(scorer.feature, np.int64)[inner],
        _floats(scorer.threshold)[inner],
        np.array(tree, np.int64)[inner],
        np.array([below[scorer.left[node]] for node in inner], np.int64),
    )


def _feature_table(
    splits: Splits, feature: int, num_trees: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Thresholds of one feature, and the leaves that each number of failed ones leaves alive."""
    _, values, tree, ruled_out = (column[splits.feature == feature] for column in splits)
    thresholds, ranks = np.unique(values, return_inverse=True)
    alive = np.full((len(thresholds) + 1, num_trees), -1, np.int64)
    np.bitwise_and.at(alive, (ranks + 1, tree), ~ruled_out)
    # What a threshold rules out stays so above it: one pass over the table, not one for each split.
    return thresholds, np.bitwise_and.accumulate(alive, axis=0, out=alive)


def highest_log_odds(scorer: Scorer) -> float:
    """What no node can exceed: the best leaf of every tree; nothing is known of a network."""
    if isinstance(scorer, FfnScorer):
        return math.inf
    best = list(scorer.value)
    for node in reversed(range(len(best))):
        if scorer.feature[node] >= 0:
            best[node] = max(best[scorer.left[node]], best[scorer.right[node]])
    return sum(best[root] for root in scorer.roots)
