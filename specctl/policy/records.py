"""The parameters of every policy family, validated; plain values that serialise to JSON.

The fields named in `learned` were fitted: the codec moves them into `policy.safetensors` and
leaves a reference in the manifest. Everything else is a hyperparameter.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
MAX_DEPTH, MAX_TOP_K, MAX_TOKENS = 64, 64, 1024
"""Bounds that keep a hostile or mistyped record from asking for absurd memory."""
Depth = Annotated[int, Field(ge=1, le=MAX_DEPTH)]
TopK = Annotated[int, Field(ge=1, le=MAX_TOP_K)]
NumTokens = Annotated[int, Field(ge=2, le=MAX_TOKENS)]


def _require(holds: bool, law: str) -> None:  # noqa: FBT001
    if not holds:
        raise ValueError(law)


def floor_float32(value: float) -> float:
    """The largest float32 not above `value`.

    Thresholds are compared in float32 at run time; rounding to nearest could move one past a
    data point (notes/dependencies.md, section 3), rounding down keeps every `x <= t` decision.
    """
    _require(abs(value) <= MAX_FLOAT32, f"magnitude exceeds float32, {MAX_FLOAT32:.3g}")
    nearest = np.float32(value)
    if float(nearest) <= value:  # as Python floats: numpy would round `value` to float32 first
        return float(nearest)
    return float(np.nextafter(nearest, np.float32(-np.inf)))


def ceil_float32(value: float) -> float:
    """The smallest float32 not below `value`: keeps every `x < t` decision in float32."""
    return -floor_float32(-value)


MAX_FLOAT32 = float(np.finfo(np.float32).max)
Float32 = Annotated[float, AfterValidator(floor_float32)]
Array = tuple[Float32, ...]
Matrix = tuple[Array, ...]


class Record(BaseModel):
    """Frozen, strict, no unknown fields, no NaN: nothing is guessed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    learned: ClassVar[tuple[str, ...]] = ()
    """Fields that the codec keeps in safetensors rather than in the manifest."""


def _increasing(values: Array) -> bool:
    return all(low < high for low, high in pairwise(values))


# --------------------------------------------------------------------------- shapes


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
        _require(
            self.num_tokens > self.depth,
            f"num_tokens counts the root and must exceed depth: {self.num_tokens} <= {self.depth}",
        )
        return self


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
    edges: Array = Field(min_length=1, max_length=255)
    gammas: tuple[Annotated[float, Field(gt=0.0, le=4.0)], ...] = (0.3, 0.6, 1.0)
    alpha: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    index_base: Literal[0, 1] = 0
    cap_tokens: bool = False
    path: Literal["cumulative", "conditional"] = "cumulative"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require(_increasing(self.edges), "edges must be strictly increasing")
        _require(len(self.gammas) <= len(self.edges) + 1, "more gammas than bins")
        _require(max(self.plan_depths) <= MAX_DEPTH, f"extended depth exceeds {MAX_DEPTH}")
        _require(max(self.plan_tokens) <= MAX_TOKENS, f"extended size exceeds {MAX_TOKENS}")
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
        _require(
            shapes == (width, width, hidden, hidden, 1) and all(len(r) == width for r in self.w1),
            f"weights do not fit {width} features and {hidden} hidden units",
        )
        _require(2 <= hidden <= 64, "hidden units must be between 2 and 64")
        _require(all(s > 0 for s in self.scale), "scale must be positive")
        return self


class TreesScorer(Record):
    """Boosted trees in flat arrays (LightGBM, exported): leaf if `feature` is -1.

    Attributes:
        features: names of the node features it reads, in order.
        roots: first node of each tree.
        feature, threshold, left, right, value: one entry a node; go left if x <= threshold.
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
        _require(len({len(column) for column in columns}) == 1, "node arrays differ in length")
        _require(all(0 <= r < size for r in self.roots), "a root points outside the arrays")
        _require(
            all(
                f == -1 or (f < len(self.features) and i < left < size and i < right < size)
                for i, (f, left, right) in enumerate(
                    zip(self.feature, self.left, self.right, strict=True)
                )
            ),
            "children must stand after their parent and inside the arrays",
        )
        return self


Scorer = Annotated[FfnScorer | TreesScorer, Field(discriminator="kind")]


class ScoredTree(Record):
    """C2T and its rivals: a classifier prunes nodes while the tree grows.

    Attributes:
        scorer: what predicts acceptance of a node.
        predicts: the joint acceptance of the paper, or the conditional one, multiplied along
            the path.
        beta: a node below this score is neither expanded nor submitted.
        depth: drafted levels at most (the paper: 11).
        first_top_k, second_top_k: children of the root's level / nodes kept per later level
            (the paper's first and second Top-K).
        num_tokens: cap on submitted nodes, root counted; none as in the paper.
        running_min: force a child's score below its parent's, so that pruning stays closed.
    """

    kind: Literal["c2t"] = "c2t"
    scorer: Scorer
    predicts: Literal["joint", "conditional"] = "joint"
    beta: Probability
    depth: Depth = 11
    first_top_k: TopK = 10
    second_top_k: TopK = 10
    num_tokens: NumTokens | None = None
    running_min: bool = True


class SparseGates(Record):
    """ECHO's sparse confidence gates (arXiv:2604.09603, section 4.2).

    Attributes:
        depth: levels at most; the paper has no cap, the settled reading adds one.
        width: default nodes kept per level. max_width: W_max of a widened level.
        gate_levels: levels with a gate, 1-based (the paper's d = 0 is level 1).
        thresholds: joint probability of the level's best node below which drafting truncates.
        num_tokens: nodes submitted, root counted.
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
        _require(len(self.gate_levels) == len(self.thresholds), "one threshold per gate level")
        _require(_increasing(self.gate_levels), "gate levels must be strictly increasing")
        _require(self.gate_levels[-1] <= self.depth, "a gate lies below the deepest level")
        _require(self.width <= self.max_width, "width exceeds max_width")
        return self


class EntropyStop(Record):
    """AdaSD's drafting rule: stop when the drafter's entropy exceeds an online threshold.

    The threshold of a request is the mean of its mean accepted and mean rejected entropy.

    Attributes:
        window: draft tokens at most (the paper: 20). top_k: 1 for chains; more grows a tree.
        min_samples: accepted and rejected tokens to see before the rule acts.
        prior_accepted, prior_rejected: warm start, nats, each weighing `prior_weight` tokens.
        keep_last: submit the uncertain token too (paper text) and stop after it.
    """

    kind: Literal["adasd_stop"] = "adasd_stop"
    window: Depth = 20
    top_k: TopK = 1
    min_samples: Annotated[int, Field(ge=0)] = 8
    prior_accepted: Annotated[float, Field(ge=0)] | None = None
    prior_rejected: Annotated[float, Field(ge=0)] | None = None
    prior_weight: Annotated[float, Field(ge=0)] = 0.0
    keep_last: bool = True


class SignalStop(Record):
    """A chain that stops on one signal of the drafter; the static rivals of adaptive length.

    `confidence` stops below the threshold (transformers' assistant), `entropy` above it
    (SVIP compares its root), `survival` when the joint probability falls below it (DDD).
    """

    kind: Literal["stop"] = "stop"
    signal: Literal["confidence", "entropy", "sqrt_entropy", "survival"]
    threshold: Annotated[float, Field(ge=0)]
    window: Depth = 20


Shape = Annotated[
    RootOnly
    | Chain
    | StaticTree
    | EntropyBins
    | ScoredTree
    | SparseGates
    | EntropyStop
    | SignalStop,
    Field(discriminator="kind"),
]

# --------------------------------------------------------------------------- budgets


class PerRequest(Record):
    """Each request submits what its shape chose."""

    kind: Literal["per_request"] = "per_request"


class ElasticBudget(Record):
    """ECHO's batch budget (Algorithm 1, repaired: never negative, fair order, root counted).

    Attributes:
        max_tokens: K_max, nodes verified per round over the batch, roots counted.
        default_width: W_dflt, nodes a level costs.
    """

    kind: Literal["echo_budget"] = "echo_budget"
    max_tokens: PositiveInt
    default_width: TopK = 3


class SurvivalBudget(Record):
    """Global top slots by joint acceptance probability, the rule vLLM and DSpark ship.

    Attributes:
        max_tokens: nodes verified per round over the batch, roots counted; where absent, the
            size is chosen by expected tokens over profiled step cost.
    """

    kind: Literal["survival"] = "survival"
    max_tokens: PositiveInt | None = None


class MarginalBudget(Record):
    """Verify a node iff its joint acceptance is at least rate · marginal cost (section 2.2)."""

    kind: Literal["marginal"] = "marginal"
    tokens_per_s: Annotated[float, Field(gt=0)]


Budget = Annotated[
    PerRequest | ElasticBudget | SurvivalBudget | MarginalBudget, Field(discriminator="kind")
]

# --------------------------------------------------------------------------- acceptances


class Strict(Record):
    """Point-mass verification: follow the child that equals the target's token. Lossless."""

    kind: Literal["strict"] = "strict"


class Mars(Record):
    """MARS: also accept the target's second choice where its margin is low. Lossy.

    Attributes:
        mode: `alg1` (greedy, the paper), `sound` (sampling by coupling, strict child first),
            `code_v1` (as released; its sampler is lossy even at theta 1).
        form: `ratio` z2/z1 of logits, `margin` z1 - z2 in nats, `prob_ratio` p2/p1.
        theta: accept the second choice above it (below it for `margin`).
        deny_token_ids: never relaxed (EOS, digits, tool-call marks).
    """

    kind: Literal["mars"] = "mars"
    mode: Literal["alg1", "sound", "code_v1"] = "sound"
    form: Literal["ratio", "margin", "prob_ratio"] = "ratio"
    theta: Annotated[float, Field(ge=0)] = 0.9
    deny_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        _require(self.form == "margin" or self.theta <= 1, "a ratio threshold is at most 1")
        return self


class JensenShannon(Record):
    """AdaSD's acceptance: match, or Jensen-Shannon distance below an online threshold. Lossy.

    Attributes:
        max_threshold: certified clip, square root of bits, in [0, 1].
        min_samples: accepted and rejected tokens in strict mode before the rule acts.
        prior_accepted, prior_rejected: warm start, each weighing `prior_weight` tokens.
    """

    kind: Literal["adasd_accept"] = "adasd_accept"
    max_threshold: Probability = 1.0
    min_samples: Annotated[int, Field(ge=0)] = 8
    prior_accepted: Probability | None = None
    prior_rejected: Probability | None = None
    prior_weight: Annotated[float, Field(ge=0)] = 0.0


Acceptance = Annotated[Strict | Mars | JensenShannon, Field(discriminator="kind")]


class Policy(Record):
    """A shape, a budget and an acceptance; any of them may be the default."""

    shape: Shape
    budget: Budget = PerRequest()
    acceptance: Acceptance = Strict()

    @property
    def lossless(self) -> bool:
        """Whether the emitted text follows the target's own law, whatever the shape."""
        return isinstance(self.acceptance, Strict)

    @property
    def name(self) -> str:
        """Kinds of the parts that are not the default, e.g. `hetero` or `echo+echo_budget`."""
        parts: list[Any] = [self.shape, self.budget, self.acceptance]
        kinds = [part.kind for part in parts if not isinstance(part, PerRequest | Strict)]
        return "+".join(kinds)
