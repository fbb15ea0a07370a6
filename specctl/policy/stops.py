"""Drafts that stop by the drafter's own probabilities: by a signal, by a tree's beam, or by a
level's gain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import (
    PROBS,
    WINDOWS,
    Depth,
    Length,
    NumTokens,
    Shape,
    ShapeFamily,
    TopK,
    grid,
    never,
    prunes,
)
from specctl.policy.rules import (
    BaseShape,
    Frontier,
    Level,
    Plan,
    best_nodes,
    best_of_level,
    rows_below,
    stop_rows,
)
from specctl.policy.static import Chain
from specctl.records import Probability, ceil_float32, floor_float32, increasing, require
from specctl.tree import DraftPool

_READ = {
    "confidence": "draft_logp",
    "entropy": "parent_entropy",
    "sqrt_entropy": "parent_entropy",
    "entropy_bound": "parent_entropy",
    "survival": "joint_prob",
}
"""The feature of each signal."""


class SignalStop(Shape):
    """A draft that stops by one signal of the drafter.

    A token is uncertain where its signal passes the threshold:

    - `confidence`: its probability given its parent is below (transformers' assistant, 0.4);
    - `survival`: the probability of the whole path is below (DDD with a beam of one);
    - `entropy`: the entropy of its distribution is above, nats;
    - `sqrt_entropy`: the square root of the entropy is above (SVIP, arXiv:2411.18462, Eq. 7, 0.3);
    - `entropy_bound`: 1 - sqrt(entropy_factor · entropy) is below (AdaEDL, arXiv:2410.18351,
      with a fixed λ).
    """

    kind: Literal["stop"] = "stop"
    signal: Literal["confidence", "survival", "entropy", "sqrt_entropy", "entropy_bound"]
    threshold: Annotated[float, Field(ge=0)]  # as above
    window: Depth = 20  # draft levels at most (transformers: 20)
    top_k: TopK = 1
    """1 for chains. More grows an EAGLE-2 tree, which stops by the best node of a level, as
    HeteroSpec applies AdaEDL to EAGLE-3 (arXiv:2505.13254, appendix A.10)."""
    num_tokens: NumTokens | None = None
    """Nodes submitted, root counted; required for trees, not allowed for chains."""
    entropy_factor: Annotated[float, Field(gt=0)] = 0.2
    """AdaEDL's γ, 0.2 in all its experiments; only for `entropy_bound`."""
    keep_last: bool = True
    """Submit the uncertain token and stop after it, as transformers does; false, for chains only,
    stops before it and does not test the first token, as SVIP's Algorithm 1 does."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (_READ[self.signal],)

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        unbounded = self.signal in ("entropy", "sqrt_entropy")
        require(unbounded or self.threshold <= 1, f"a {self.signal} threshold is at most 1")
        chain, size = self.top_k == 1, self.num_tokens
        require(chain == (size is None), "num_tokens goes with top_k above 1, and needs it")
        require(size is None or size > self.window, "num_tokens must exceed window")
        require(chain or self.keep_last, "a tree submits the level that it stops at: keep_last")
        return self


Uncertain = Callable[[DraftPool], Tensor]
"""`[B, P]` bool: drafting stops at this token."""


@dataclass(kw_only=True)
class SignalStopShape(BaseShape):
    """Ends at the first level whose best node is uncertain; a chain also before it."""

    uncertain: Uncertain
    keep_last: bool

    def grow(self, plan: Plan, level: Level) -> Frontier:
        best = best_of_level(level, self.width)
        stop_rows(plan, level, self._ends(level.pool).gather(1, best[:, :1])[:, 0])
        return rows_below(plan, level, best)

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        if not self.keep_last:
            kept = pool.joint_logp.masked_fill(self._ends(pool), float("-inf"))
            pool = pool._replace(joint_logp=kept)
        return best_nodes(pool, self.max_tokens)

    def _ends(self, pool: DraftPool) -> Tensor:
        """`[B, P]` bool: uncertain tokens, except the root and a first token that must stay."""
        first_tested = 1 if self.keep_last else 2
        return self.uncertain(pool) & (pool.depth >= first_tested)


def signal_stop_shape(record: SignalStop, device: Device) -> SignalStopShape:
    size = (record.window, record.top_k, record.top_k, record.num_tokens or record.window + 1)
    uncertain = uncertainty(record)
    return SignalStopShape(*size, device, uncertain=uncertain, keep_last=record.keep_last)


def uncertainty(record: SignalStop) -> Uncertain:
    """The test of a record, its threshold rounded so that float32 decides as float64 would."""
    below, above = ceil_float32(record.threshold), floor_float32(record.threshold)
    factor = record.entropy_factor
    tests: dict[str, Uncertain] = {
        "confidence": lambda pool: pool.draft_logp.exp() < below,
        "survival": lambda pool: pool.joint_logp.exp() < below,
        "entropy": lambda pool: pool.entropy > above,
        # Rounding can put the entropy of a certain token just below 0.
        "sqrt_entropy": lambda pool: pool.entropy.clamp(min=0).sqrt() > above,
        "entropy_bound": lambda pool: 1 - (factor * pool.entropy).clamp(min=0).sqrt() < below,
    }
    return tests[record.signal]


def withholds(record: SignalStop) -> str | None:
    """The reason why a record's stop is not predictable; see `ShapeFamily.withholds`.

    A stop after the token is predictable, as it concerns later tokens, and so is a stop before it
    by the entropy of its distribution.
    """
    if record.top_k > 1:
        return "drafts trees"
    if record.keep_last or _READ[record.signal] == "parent_entropy":
        return None
    return f"withholds a drafted token for its own {record.signal} (keep_last=true submits it)"


ROOTS = "0.3 0.5 0.7 0.9 1.1 1.3 1.6 2.0"
BY_SIGNAL = {
    "confidence": PROBS,
    "survival": "0.01 0.03 0.05 0.1 0.2 0.3 0.4 0.5 0.6 0.7",
    "entropy": "0.25 0.5 1.0 1.5 2.0 2.5 3.0 4.0",
    "sqrt_entropy": ROOTS,
    "entropy_bound": PROBS,
}
EAGLE3_STOP = {
    "signal": "entropy_bound",
    "threshold": 0.15,
    "window": 8,
    "top_k": 10,
    "num_tokens": 60,
}
"""The threshold is ours: on the embedded pair it loses the share of τ that HeteroSpec's Table 11
states (docs/concepts.md)."""
STOP = ShapeFamily(
    record=SignalStop,
    rule=signal_stop_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=True,
    is_ranked=lambda record: record.top_k == 1,
    kernel=None,
    withholds=withholds,
    words={
        "stop": {},
        "confidence": {"signal": "confidence", "threshold": 0.4},
        "svip": {"signal": "sqrt_entropy", "threshold": 0.3, "keep_last": False},
        "adaedl": {"signal": "entropy_bound"},
        "adaedl-eagle3": EAGLE3_STOP,
    },
    grids={
        "confidence": grid(threshold=PROBS, window=WINDOWS),
        "svip": grid(threshold=ROOTS, window=WINDOWS),
        "adaedl": grid(threshold=PROBS, window=WINDOWS),
        **{
            f"stop:signal={signal}": grid(threshold=values, window=WINDOWS)
            for signal, values in BY_SIGNAL.items()
        },
    },
    chain=lambda record: record.model_copy(update={"top_k": 1, "num_tokens": None}),
)


# --------------------------------------------------------------------------- llama.cpp


class TopProbability(Shape):
    """llama.cpp's chain: it ends before a token that is improbable among the likeliest ten.

    A token whose probability, renormalised over the ten likeliest, is below `threshold` is left
    out, the first one too. A chain shorter than `min_draft_tokens` is not verified at all.
    """

    always_reads: ClassVar = ("draft_logp",)
    kind: Literal["p_min"] = "p_min"
    threshold: Probability = 0.0  # `--spec-draft-p-min`
    window: Depth = 3  # `--spec-draft-n-max`, draft tokens at most
    min_draft_tokens: Length = 0  # `--spec-draft-n-min`

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        require(self.min_draft_tokens <= self.window, "min_draft_tokens must not exceed window")
        return self


LIKELIEST = 10
"""Tokens that llama.cpp's sampler of drafts keeps."""


@dataclass(kw_only=True)
class TopProbabilityShape(BaseShape):
    """The likeliest path, ended before the first token below the threshold."""

    least_prob: float
    min_draft_tokens: int

    def grow(self, plan: Plan, level: Level) -> Frontier:
        stop_rows(plan, level, ~self._certain(level.pool)[:, -1])
        return rows_below(plan, level, best_of_level(level, 1))

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        certain = self._certain(pool)
        kept = certain.long().cumprod(1).sum(1, keepdim=True)
        kept = kept.masked_fill(kept < self.min_draft_tokens, 0)
        level = torch.arange(certain.shape[1] + 1, device=kept.device)
        index = torch.where(level > 0, 1 + (level - 1) * self.top_k, 0)
        return index.expand(len(kept), -1).masked_fill(level > kept, -1)

    def _certain(self, pool: DraftPool) -> Tensor:
        """`[B, L]` bool: the likeliest token of each level may be verified."""
        levels = (len(pool.depth), -1, self.top_k)
        logp = pool.draft_logp[:, 1:].double().masked_fill(~pool.valid[:, 1:], -torch.inf)
        logp = logp.view(levels)
        probs = (logp[..., 0] - logp.logsumexp(-1)).exp()  # NaN at levels that were not drafted
        return pool.valid[:, 1:].view(levels)[..., 0] & (probs >= self.least_prob)


def top_probability_shape(record: TopProbability, device: Device) -> TopProbabilityShape:
    children = LIKELIEST if record.threshold > 0 else 1
    size = (record.window, children, 1, record.window + 1)
    least, shortest = ceil_float32(record.threshold), record.min_draft_tokens
    return TopProbabilityShape(*size, device, least_prob=least, min_draft_tokens=shortest)


def stop_or_chain(record: TopProbability) -> Chain | SignalStop:
    """The nearest chain of other engines."""
    if record.threshold == 0:
        return Chain(num_draft_tokens=record.window)
    return SignalStop(signal="confidence", threshold=record.threshold, window=record.window)


def withholds_token(record: TopProbability) -> str | None:
    """The reason why a record's stop is not predictable; see `ShapeFamily.withholds`."""
    return "withholds a drafted token for its own probability" if record.threshold else None


P_MIN = ShapeFamily(
    record=TopProbability,
    rule=top_probability_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=False,
    is_ranked=never,
    kernel=None,
    withholds=withholds_token,
    words={"p_min": {}},
    grids={"p_min": grid(threshold="0.3 0.4 0.5 0.6 0.7 0.8 0.9", window=WINDOWS)},
    chain=stop_or_chain,
)


# --------------------------------------------------------------------------- DDD


class DynamicDepth(Shape):
    """DDD: an EAGLE-2 tree that grows while its beam is likely (arXiv:2409.00142, Alg. 1).

    The heuristic H is the log of the summed path probabilities of the beam, the nodes to expand
    next. All drafted nodes may be submitted.
    """

    always_reads: ClassVar = ("joint_prob",)
    kind: Literal["ddd"] = "ddd"
    depth: Depth = 11  # drafted levels at most (the paper's n)
    top_k: TopK = 10  # children per expanded node and nodes expanded per level (its w)
    num_tokens: NumTokens = 60  # nodes submitted, root counted
    check_levels: tuple[Depth, ...] = (5, 7, 9)
    """Levels after which H is compared (its S); each check waits for the device."""
    min_beam_logp: Annotated[float, Field(le=0)] = -0.3
    """Nats; drafting stops if H is below it (its x)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(self.num_tokens > self.depth, "num_tokens counts the root and must exceed depth")
        require(increasing(self.check_levels), "check_levels must be strictly increasing")
        return self


@dataclass(kw_only=True)
class DynamicDepthShape(BaseShape):
    """EAGLE-2's tree, ended where the beam is less likely than `min_beam_prob`."""

    check_levels: tuple[int, ...]
    min_beam_prob: float

    def grow(self, plan: Plan, level: Level) -> Frontier:
        beam = best_of_level(level, self.width)
        if level.depth in self.check_levels:
            joint_prob = level.pool.joint_logp.gather(1, beam).double().exp()
            stop_rows(plan, level, joint_prob.sum(1) < self.min_beam_prob)
        return rows_below(plan, level, beam)


def dynamic_depth_shape(record: DynamicDepth, device: Device) -> DynamicDepthShape:
    size = (record.depth, record.top_k, record.top_k, record.num_tokens)
    least = math.exp(record.min_beam_logp)
    return DynamicDepthShape(*size, device, check_levels=record.check_levels, min_beam_prob=least)


DDD = ShapeFamily(
    record=DynamicDepth,
    rule=dynamic_depth_shape,
    is_static=False,
    is_deep=True,
    is_timed=True,
    reads_entropy=False,
    is_ranked=never,
    kernel=None,
    withholds=prunes,
    words={"ddd": {}},
    grids={
        "ddd": grid(
            depth="4 6 8 11",
            top_k="4 8 10",
            num_tokens="12 24 48 60",
            check_levels="2/4/6 3/5/7 5/7/9",
            min_beam_logp="-0.1 -0.3 -0.7 -1.2 -2.0",
        )
    },
    chain=lambda record: record.model_copy(update={"top_k": 1}),
)


# --------------------------------------------------------------------------- OPT-Tree


class OptTree(Shape):
    """OPT-Tree: the tree of highest expected acceptance under a node budget (arXiv:2406.17276).

    The best tree of the nodes so far is the `num_tokens` nodes of highest path probability, and
    its expected acceptance length is their sum. Drafting continues while the last level raised it
    by more than `min_gain`.
    """

    always_reads: ClassVar = ("joint_prob",)
    kind: Literal["opt_tree"] = "opt_tree"
    depth: Depth = 10  # drafted levels at most (the released code: 10)
    top_k: TopK = 10
    """Children per expanded node and nodes expanded per level. The paper's `num_tokens - 1` drops
    no node, but exceeds a log's."""
    num_tokens: NumTokens = 51  # nodes submitted, root counted
    min_gain: Annotated[float, Field(ge=0)] = 0.5
    """Δ, tokens; the paper suggests the ratio of the costs of a draft step and a target step."""


@dataclass(kw_only=True)
class OptTreeShape(BaseShape):
    """Stops after a level that raised the expectation by at most `min_gain` tokens."""

    min_gain: float

    def grow(self, plan: Plan, level: Level) -> Frontier:
        joint_logp, budget = level.pool.joint_logp, self.max_tokens - 1
        gain = expected_accepted(joint_logp, budget)
        gain = gain - expected_accepted(joint_logp[:, : level.start], budget)
        stop_rows(plan, level, gain <= self.min_gain)
        return rows_below(plan, level, best_of_level(level, self.width))


def expected_accepted(joint_logp: Tensor, num_nodes: int) -> Tensor:
    """`[B]` float64: expected accepted draft tokens of the best tree of `num_nodes` draft nodes,
    E(A) - 1 (section 3.2). `joint_logp` is `[B, P]`, root first."""
    drafted = joint_logp[:, 1:]
    best = drafted.topk(min(num_nodes, drafted.shape[1]), dim=1).values
    return best.double().exp().sum(1)


def opt_tree_shape(record: OptTree, device: Device) -> OptTreeShape:
    size = (record.depth, record.top_k, record.top_k, record.num_tokens)
    return OptTreeShape(*size, device, min_gain=record.min_gain)


OPT_TREE = ShapeFamily(
    record=OptTree,
    rule=opt_tree_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=False,
    is_ranked=never,
    kernel=None,
    withholds=prunes,
    words={"opt_tree": {}},
    grids={
        "opt_tree": grid(
            depth="4 6 8 10",
            top_k="4 8 10",
            num_tokens="6 12 24 51",
            min_gain="0.05 0.1 0.2 0.3 0.5 0.8",
        )
    },
    chain=lambda record: record.model_copy(update={"top_k": 1}),
)
