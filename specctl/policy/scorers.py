"""Scorers predict a node's acceptance: a tiny network, boosted trees in flat arrays, or a table.

All decide in float32, batched, without a loop over nodes and without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.features import SUFFIX_TOKENS
from specctl.lazy import Tensor, np, torch
from specctl.records import Array, Matrix, Record, increasing, require

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TREE_NODES, MAX_LEAVES, MAX_HIDDEN, MAX_CELLS = 1 << 16, 63, 64, 256
"""Bounds that keep a hostile record from asking for absurd memory; leaves of a tree are bits of an
int64 at run time."""


class FfnScorer(Record):
    """C2T's two-layer ReLU network (arXiv:2502.13652, section 3.2), sigmoid output.

    Attributes:
        features: names of the node features it reads, in order.
        mean, scale: standardisation of each feature.
        w1, b1: `[H, F]`, `[H]`. w2, b2: `[H]`, `[1]`.
    """

    learned: ClassVar = ("mean", "scale", "w1", "b1", "w2", "b2")
    kind: Literal["ffn"] = "ffn"
    features: tuple[str, ...] = Field(min_length=1)
    mean: Array
    scale: Array
    w1: Matrix
    b1: Array
    w2: Array
    b2: Array

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        width, hidden = len(self.features), len(self.b1)
        shapes = (len(self.mean), len(self.scale), len(self.w1), len(self.w2), len(self.b2))
        require(
            shapes == (width, width, hidden, hidden, 1) and all(len(r) == width for r in self.w1),
            f"weights do not fit {width} features and {hidden} hidden units",
        )
        require(2 <= hidden <= MAX_HIDDEN, f"hidden units must be between 2 and {MAX_HIDDEN}")
        require(all(s > 0 for s in self.scale), "scale must be positive")
        return self


class TreesScorer(Record):
    """Boosted trees in flat arrays (LightGBM, exported): leaf if `feature` is -1.

    Attributes:
        features: names of the node features it reads, in order.
        roots: first node of each tree.
        feature, threshold, left, right, value: one entry a node; go left if x <= threshold.
            The values of the leaves that a node reaches add up to its log-odds.
    """

    learned: ClassVar = ("roots", "feature", "threshold", "left", "right", "value")
    kind: Literal["trees"] = "trees"
    features: tuple[str, ...] = Field(min_length=1)
    roots: tuple[int, ...] = Field(min_length=1)
    feature: tuple[int, ...]
    threshold: Array
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: Array

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        columns = (self.feature, self.threshold, self.left, self.right, self.value)
        size = len(self.feature)
        require(len({len(column) for column in columns}) == 1, "node arrays differ in length")
        require(all(0 <= r < size for r in self.roots), "a root points outside the arrays")
        require(size <= MAX_TREE_NODES, f"more than {MAX_TREE_NODES} nodes")
        nodes = enumerate(zip(self.feature, self.left, self.right, strict=True))
        inner = [(i, *node) for i, node in nodes if node[0] != -1]
        require(
            all(
                0 <= feature < len(self.features) and i < left < size and i < right < size
                for i, feature, left, right in inner
            ),
            "children must stand after their parent and inside the arrays",
        )
        children = [child for *_, left, right in inner for child in (left, right)]
        require(
            sorted((*self.roots, *children)) == list(range(size)),
            "every node must be one root or one node's child",
        )
        require(max(self.num_leaves) <= MAX_LEAVES, f"a tree of more than {MAX_LEAVES} leaves")
        return self

    @property
    def num_leaves(self) -> tuple[int, ...]:
        """Leaves of every tree."""
        below = [1] * len(self.feature)
        for node in reversed(range(len(below))):
            if self.feature[node] >= 0:
                below[node] = below[self.left[node]] + below[self.right[node]]
        return tuple(below[root] for root in self.roots)


class AcceptanceTable(Record):
    """Acceptance given the parent's, by the drafter's probability and what the text repeats.

    Attributes:
        edges: natural logs of draft probabilities, ascending, E of them: bin i holds those above
            edge i - 1 up to edge i.
        log_odds: `[2 · SUFFIX_TOKENS + 1, E + 1]`, a row for each value of `copy_length`, from
            -SUFFIX_TOKENS on.
    """

    learned: ClassVar = ("edges", "log_odds")
    kind: Literal["table"] = "table"
    features: tuple[Literal["draft_logp"], Literal["copy_length"]] = ("draft_logp", "copy_length")
    edges: Array
    log_odds: Matrix

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        rows, columns = 2 * SUFFIX_TOKENS + 1, len(self.edges) + 1
        require(
            len(self.log_odds) == rows and all(len(row) == columns for row in self.log_odds),
            f"a table of {len(self.edges)} edges has {rows} rows of {columns} cells",
        )
        require(columns <= MAX_CELLS, f"at most {MAX_CELLS} cells a row")
        require(increasing(self.edges), "edges must ascend")
        return self


Scorer = Annotated[FfnScorer | TreesScorer | AcceptanceTable, Field(discriminator="kind")]
"""A learned score of nodes."""


BLOCK_ROWS = 256
"""Nodes that are scored by trees together: what is alive of them stays within the cache."""


LogOdds = Callable[[Tensor], Tensor]
"""`[n, F]` float32 features of nodes to `[n]` float32 log-odds of acceptance."""


def build_log_odds(scorer: Scorer, device: torch.device | str = "cpu") -> LogOdds:
    """The function of a scorer, its tables on `device`."""
    if isinstance(scorer, FfnScorer):
        return ffn_log_odds(scorer, torch.device(device))
    if isinstance(scorer, TreesScorer):
        return trees_log_odds(scorer, torch.device(device))
    return table_log_odds(scorer, torch.device(device))


@dataclass(frozen=True)
class FfnLogOdds:
    """`w2 · relu(w1 · x + b1) + b2`, `[F, H]`, `[H]`, `[H]` and `[1]`; x is standardised by w1."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        # Faster than addmm if this small.
        hidden = torch.mm(features, self.w1).add_(self.b1).relu_()
        return torch.mv(hidden, self.w2).add_(self.b2)


def ffn_log_odds(scorer: FfnScorer, device: torch.device) -> FfnLogOdds:
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


@dataclass(frozen=True)
class TableLogOdds:
    """The cell of a node, `[E]` edges and `[(2 · SUFFIX_TOKENS + 1) · (E + 1)]` log-odds."""

    edges: Tensor
    log_odds: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        logp, copied = features.unbind(1)
        found = self.log_odds[self.cells(logp, copied.long())]
        return torch.where(logp.isnan(), logp, found)

    def cells(self, draft_logp: Tensor, copied: Tensor) -> Tensor:
        """int64 places in `log_odds`, of the common shape of both."""
        columns = len(self.edges) + 1
        first = torch.bucketize(draft_logp.contiguous(), self.edges).add_(SUFFIX_TOKENS * columns)
        return first.add_(copied, alpha=columns)


def table_log_odds(scorer: AcceptanceTable, device: torch.device) -> TableLogOdds:
    tables = (_floats(scorer.edges), np.array(scorer.log_odds, np.float32).flatten())
    return TableLogOdds(*(torch.from_numpy(table).to(device) for table in tables))


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
    leaves = [_leaves(scorer, root) for root in scorer.roots]
    # Of each node its tree, and the leaves below it as bits. A pass over the nodes each way, as
    # parents stand before their children: trees of strangers may be as deep as they have leaves.
    tree, below = [0] * len(scorer.feature), [0] * len(scorer.feature)
    for number, (root, places) in enumerate(zip(scorer.roots, leaves, strict=True)):
        tree[root] = number
        for place, leaf in enumerate(places):
            below[leaf] = 1 << place
    inner = [node for node, feature in enumerate(scorer.feature) if feature >= 0]
    for node in inner:
        tree[scorer.left[node]] = tree[scorer.right[node]] = tree[node]
    for node in reversed(inner):
        below[node] = below[scorer.left[node]] | below[scorer.right[node]]
    ruled_out = np.array([below[scorer.left[node]] for node in inner], np.int64)
    feature, threshold = np.array(scorer.feature)[inner], _floats(scorer.threshold)[inner]
    tables = []
    for index in range(len(scorer.features)):
        mine = feature == index
        thresholds, ranks = np.unique(threshold[mine], return_inverse=True)
        alive = np.full((len(thresholds) + 1, len(leaves)), -1, np.int64)
        np.bitwise_and.at(alive, (ranks + 1, np.array(tree)[inner][mine]), ~ruled_out[mine])
        # What a threshold rules out stays so above it: a pass over the table, not one a split.
        np.bitwise_and.accumulate(alive, axis=0, out=alive)
        tables.append((torch.from_numpy(thresholds), torch.from_numpy(alive)))
    values = _floats([scorer.value[leaf] for places in leaves for leaf in places])
    first = np.cumsum([0, *(len(places) for places in leaves[:-1])])
    return TreesLogOdds(
        tuple(thresholds.to(device) for thresholds, _ in tables),
        tuple(alive.to(device) for _, alive in tables),
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


def highest_log_odds(scorer: Scorer) -> float:
    """A bound on all nodes: the best cell, the best leaf of every tree; infinite for a network."""
    if isinstance(scorer, FfnScorer):
        return math.inf
    if isinstance(scorer, AcceptanceTable):
        return max(map(max, scorer.log_odds))
    best = list(scorer.value)
    for node in reversed(range(len(best))):
        if scorer.feature[node] >= 0:
            best[node] = max(best[scorer.left[node]], best[scorer.right[node]])
    return sum(best[root] for root in scorer.roots)
