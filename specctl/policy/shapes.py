"""Shapes: how a tree grows and which of its nodes are submitted."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from specctl.policy.adaptive import (
    DynamicDepth,
    EntropyStop,
    JointThreshold,
    OptTree,
    SignalStop,
)
from specctl.policy.base import (
    MAX_DEPTH,
    MAX_TOKENS,
    Array,
    Depth,
    NumTokens,
    Probability,
    Record,
    TopK,
    ceil_float32,
    increasing,
    require,
)
from specctl.policy.scorers import Scorer

MAX_EDGES = 255


class RootOnly(Record):
    """Plain autoregressive decoding: no drafting, one token a call."""

    kind: Literal["ar"] = "ar"


class Chain(Record):
    """A fixed chain of the drafter's likeliest tokens.

    Attributes:
        num_draft_tokens: K, draft tokens a round (vLLM's `num_speculative_tokens`).
    """

    kind: Literal["chain"] = "chain"
    num_draft_tokens: Depth = 4


class StaticTree(Record):
    """EAGLE-2's dynamic tree with fixed size (arXiv:2406.16858; notes/engines.md, 1.1).

    Attributes:
        depth: drafted levels. EAGLE's own `depth` d drafts d + 1 of them; SGLang's
            `num_steps` is this number.
        top_k: children per expanded node and nodes expanded per level.
        num_tokens: nodes submitted, **root counted** (EAGLE's `total_token`, SGLang's
            `num_draft_tokens`).
    """

    kind: Literal["eagle2"] = "eagle2"
    depth: Depth = 6
    top_k: TopK = 8
    num_tokens: NumTokens = 48

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(
            self.num_tokens > self.depth,
            f"num_tokens counts the root and must exceed depth: {self.num_tokens} <= {self.depth}",
        )
        return self


class FullTree(Record):
    """All that a dense log holds: the policy of dense collection (design.md, section 1).

    Everything drafted is submitted, so as a live policy it is a reference for tests, not for use.

    Attributes:
        depth: drafted levels. top_k: children per expanded node (C2T's superset: 11 and 10).
        width: nodes expanded per level for their joint probability; none means `top_k`.
        nested: expand also what the static trees of every smaller top_k would, so that each of
            them is contained exactly.
    """

    kind: Literal["full"] = "full"
    depth: Depth = 11
    top_k: TopK = 10
    width: TopK | None = None
    nested: bool = True


class EntropyBins(Record):
    """HeteroSpec (arXiv:2505.13254): bins of Φ choose depth and size of an EAGLE-2 tree.

    With Δ = alpha - r in the r-th low-entropy bin (0 elsewhere), depth becomes depth + Δ and
    size becomes ceil(gamma_r · num_tokens + Δ), never below depth + 1 nodes.

    Attributes:
        base: the tree that is extended and pruned.
        edges: ascending Φ thresholds, nats; bin i holds Φ in (edges[i-1], edges[i]].
        gammas: one factor per low-entropy bin, lowest entropy first (0.3, 0.6, 1.0).
        alpha: depth extension of the first bin; the paper's best is ceil(depth / 2).
        index_base: what the paper's i starts from in Δ = alpha - i; 0 is the settled reading.
        cap_tokens: never submit more than `base.num_tokens` (gamma 1.0 would add Δ).
        path: how P* is chosen, by cumulative score or by the last token's own probability.
    """

    learned: ClassVar = ("edges",)
    kind: Literal["hetero"] = "hetero"
    base: StaticTree
    edges: Array = Field(min_length=1, max_length=MAX_EDGES)
    gammas: tuple[Annotated[float, Field(gt=0.0, le=4.0)], ...] = (0.3, 0.6, 1.0)
    alpha: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    index_base: Literal[0, 1] = 0
    cap_tokens: bool = False
    path: Literal["cumulative", "conditional"] = "cumulative"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(increasing(self.edges), "edges must be strictly increasing")
        require(len(self.gammas) <= len(self.edges) + 1, "more gammas than bins")
        require(max(self.plan_depths) <= MAX_DEPTH, f"extended depth exceeds {MAX_DEPTH}")
        require(max(self.plan_tokens) <= MAX_TOKENS, f"extended size exceeds {MAX_TOKENS}")
        return self

    @property
    def extensions(self) -> tuple[int, ...]:
        """Δ of every bin, levels."""
        alpha = math.ceil(self.base.depth / 2) if self.alpha is None else self.alpha
        low = len(self.gammas)
        return tuple(
            max(0, alpha - r - self.index_base) if r < low else 0
            for r in range(len(self.edges) + 1)
        )

    @property
    def plan_depths(self) -> tuple[int, ...]:
        """Drafted levels of every bin."""
        return tuple(self.base.depth + extension for extension in self.extensions)

    @property
    def plan_tokens(self) -> tuple[int, ...]:
        """Submitted nodes of every bin, root counted."""
        size = self.base.num_tokens
        gammas = self.gammas + (1.0,) * (len(self.edges) + 1 - len(self.gammas))
        plans = zip(gammas, self.extensions, self.plan_depths, strict=True)
        wanted = (max(math.ceil(g * size + more), depth + 1) for g, more, depth in plans)
        return tuple(
            min(n, max(size, d + 1)) if self.cap_tokens else n
            for n, d in zip(wanted, self.plan_depths, strict=True)
        )


class ScoredTree(Record):
    """C2T and its rivals: a classifier prunes nodes while the tree grows (arXiv:2502.13652).

    A chain that stops at its first node below beta is `first_top_k` and `second_top_k` of 1
    (section 5.5); with a wider first Top-K the chain follows the best scored child instead.

    Attributes:
        scorer: what predicts acceptance of a node.
        predicts: the joint acceptance of the paper, or the conditional one, multiplied along
            the path.
        beta: a node below this probability is neither expanded nor submitted.
        depth: drafted levels at most (the paper: 11).
        first_top_k: likeliest children of an expanded node that are scored at all.
        second_top_k: nodes kept per level, best score first.
        keep_leaves: submit also what reaches beta and found no place among the second Top-K,
            so that one threshold decides alone; false is the paper's, section 4.2.2.
        num_tokens: cap on submitted nodes, root counted; none as in the paper.
        running_min: force a child's score below its parent's, so that pruning stays closed
            under a cap; the product of conditionals never rises by itself.
    """

    kind: Literal["c2t"] = "c2t"
    scorer: Scorer
    predicts: Literal["joint", "conditional"] = "joint"
    beta: Probability
    depth: Depth = 11
    first_top_k: TopK = 10
    second_top_k: TopK = 10
    keep_leaves: bool = True
    num_tokens: NumTokens | None = None
    running_min: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(
            self.num_tokens is not None or self.most_tokens <= MAX_TOKENS,
            f"may submit {self.most_tokens} nodes, more than {MAX_TOKENS}: give num_tokens",
        )
        closed = self.running_min or self.predicts == "conditional" or self.num_tokens is None
        require(closed, "a cap on joint scores that may rise along a path needs running_min")
        return self

    @property
    def most_tokens(self) -> int:
        """Nodes that a round can submit without a cap, root counted."""
        total, scored = 1, self.first_top_k
        for _ in range(self.depth):
            kept = min(self.second_top_k, scored)
            total += scored if self.keep_leaves else kept
            scored = kept * self.first_top_k
        return total


class SparseGates(Record):
    """ECHO's sparse confidence gates (arXiv:2604.09603, section 3.2).

    Attributes:
        depth: levels at most; the paper has no cap, the settled reading adds one.
        width: W_dflt, nodes kept and expanded per level.
        max_width: W_max, nodes kept of a level whose gate closed; children per expanded node.
        gate_levels: levels with a gate, 1-based (the paper's d = 0 is level 1).
        thresholds: joint probability of the level's best node below which its gate closes.
        num_tokens: nodes submitted, root counted; levels are filled from the root on.
    """

    learned: ClassVar = ("thresholds",)
    kind: Literal["echo"] = "echo"
    depth: Depth = 8
    width: TopK = 3
    max_width: TopK = 10
    gate_levels: tuple[Depth, ...] = Field(min_length=1)
    thresholds: tuple[Annotated[Probability, AfterValidator(ceil_float32)], ...]
    num_tokens: NumTokens = 48

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(len(self.gate_levels) == len(self.thresholds), "one threshold per gate level")
        require(increasing(self.gate_levels), "gate levels must be strictly increasing")
        require(self.gate_levels[-1] <= self.depth, "a gate lies below the deepest level")
        require(self.width <= self.max_width, "width exceeds max_width")
        return self

    @property
    def reached_depth(self) -> int:
        """Levels that `num_tokens` leaves room for."""
        return min(self.depth, math.ceil((self.num_tokens - 1) / self.width))

    @property
    def most_tokens(self) -> int:
        """Nodes of a row whose last gate closes at the deepest level, root counted."""
        return 1 + (self.reached_depth - 1) * self.width + self.max_width


Shape = Annotated[
    RootOnly
    | Chain
    | StaticTree
    | FullTree
    | EntropyBins
    | ScoredTree
    | SparseGates
    | EntropyStop
    | SignalStop
    | DynamicDepth
    | OptTree
    | JointThreshold,
    Field(discriminator="kind"),
]
