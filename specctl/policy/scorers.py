"""What predicts a node's acceptance: a tiny network, or boosted trees in flat arrays."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.policy.base import Array, Matrix, Record, require

MAX_TREE_NODES, MAX_LEAVES, MAX_HIDDEN = 1 << 16, 63, 64
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
        require(
            all(
                f == -1 or (0 <= f < len(self.features) and i < left < size and i < right < size)
                for i, (f, left, right) in enumerate(
                    zip(self.feature, self.left, self.right, strict=True)
                )
            ),
            "children must stand after their parent and inside the arrays",
        )
        require(
            sorted((*self.roots, *self._children())) == list(range(size)),
            "every node must be one root or one node's child",
        )
        require(max(self.num_leaves) <= MAX_LEAVES, f"a tree of more than {MAX_LEAVES} leaves")
        return self

    def _children(self) -> list[int]:
        inner = [i for i, feature in enumerate(self.feature) if feature >= 0]
        return [child for i in inner for child in (self.left[i], self.right[i])]

    @property
    def num_leaves(self) -> tuple[int, ...]:
        """Leaves of every tree."""
        below = [1] * len(self.feature)
        for node in reversed(range(len(below))):
            if self.feature[node] >= 0:
                below[node] = below[self.left[node]] + below[self.right[node]]
        return tuple(below[root] for root in self.roots)


Scorer = Annotated[FfnScorer | TreesScorer, Field(discriminator="kind")]
