"""AdaSD: drafts that stop, and verification that relaxes, by thresholds learned while decoding.

Each part works alone: the stop under strict acceptance is lossless (the paper's Gen-Only), the
acceptance after a fixed chain is its Verify-Only (arXiv:2512.11280; readings in docs/adasd.md).

The tokens of the accepted path and the first rejected token of a round enter the request's two
running means; later nodes were not tested."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from specctl.lazy import Device, Tensor, torch
from specctl.policy.family import (
    WINDOWS,
    Acceptance,
    AcceptanceFamily,
    Depth,
    NumTokens,
    Shape,
    ShapeFamily,
    TopK,
    grid,
)
from specctl.policy.rules import (
    BaseShape,
    Frontier,
    Level,
    Plan,
    RoundStart,
    best_nodes,
    best_of_level,
    rows_below,
    stop_rows,
)
from specctl.policy.verification import (
    Judgement,
    Outcome,
    Verification,
    denied_ids,
    earlier_siblings,
    follows,
    has_child,
    of_parent,
)
from specctl.records import Probability, require
from specctl.tree import DraftPool, TokenTree, gather

MinSamples = Annotated[int, Field(ge=0)]
"""Accepted tokens, and rejected ones, needed before a rule acts."""
MEMORY_SIZE = 4
"""Number of tokens and the sum of their values: each accepted, then rejected."""


@dataclass(frozen=True)
class Samples:
    """The samples of a round, `[B, D + 1]` each: the accepted path and the first rejected token."""

    values: Tensor  # float64
    accepted: Tensor  # bool
    rejected: Tensor  # bool


class Running:
    """The arithmetic of the two means over memories `[B, 4]` float64."""

    def __init__(self, min_samples: int) -> None:
        self._min_samples = max(min_samples, 1)  # nothing has no mean

    def means(self, memory: Tensor) -> Tensor:
        """`[B, 2]`: mean accepted and mean rejected value; NaN without samples."""
        return memory[:, 2:] / memory[:, :2]

    def known(self, memory: Tensor) -> Tensor:
        """`[B, 2]` bool: the class has enough samples."""
        return memory[:, :2] >= self._min_samples

    def noted(self, memory: Tensor, samples: Samples) -> Tensor:
        """`[B, 4]`: the memories after a round."""
        chosen = torch.stack([samples.accepted, samples.rejected], 1)
        added = torch.where(chosen, samples.values[:, None], 0.0).sum(2)
        return memory + torch.cat([chosen.sum(2), added], 1)


def samples_of(values: Tensor, outcome: Outcome) -> Samples:
    """The samples of a round; `values` is `[B, N]`, of the submitted nodes."""
    path = outcome.path[:, 1:]
    tested = torch.cat([path, first_rejected(outcome.tree, outcome.path)[:, None]], 1)
    exists = tested >= 0
    is_last = torch.arange(tested.shape[1], device=tested.device) == tested.shape[1] - 1
    return Samples(gather(values, tested, 0).double(), exists & ~is_last, exists & is_last)


def first_rejected(tree: TokenTree, path: Tensor) -> Tensor:
    """`[B]` int64: first submitted node below the accepted path; -1 for none.

    Siblings share a distribution, so any of them gives the same values.
    """
    deepest = (path >= 0).sum(1, keepdim=True) - 1
    behind = tree.parent == path.gather(1, deepest)
    found, index = behind.to(torch.int8).max(1)
    return index.masked_fill(found == 0, -1)


# --------------------------------------------------------------------------- drafting


class EntropyStop(Shape):
    """AdaSD's drafting rule: stop after a token whose draft entropy exceeds an online threshold.

    Each request has its own threshold, in nats, computed from the entropies of its accepted and
    rejected tokens so far; it is infinite below `min_samples` of each.
    """

    always_reads: ClassVar = ("parent_entropy",)
    kind: Literal["adasd_stop"] = "adasd_stop"
    min_samples: MinSamples = 8
    window: Depth = 20  # draft levels at most (the paper: 20)
    top_k: TopK = 1
    """1 for chains. More grows an EAGLE-2 tree, which stops by the entropy of the distribution that
    a level's best node was drawn from."""
    num_tokens: NumTokens | None = None
    """Nodes submitted, root counted; required for trees, not allowed for chains."""
    between: Literal["midpoint", "rejected"] = "midpoint"
    """`midpoint` of mean accepted and mean rejected entropy, or `rejected`, the mean rejected
    entropy itself (the paper's section 4.3)."""
    keep_last: bool = True
    """Submit the uncertain token too (paper text); false drops it unless it is the first of its
    round."""

    @model_validator(mode="after")
    def _sized(self) -> Self:
        chain, size = self.top_k == 1, self.num_tokens
        require(chain == (size is None), "num_tokens goes with top_k above 1, and needs it")
        require(size is None or size > self.window, "num_tokens must exceed window")
        return self


@dataclass
class ThresholdPlan(Plan):
    """A plan with thresholds."""

    threshold: Tensor | None = None  # `[B]` float64, infinite below `min_samples`


@dataclass(kw_only=True)
class EntropyStopShape(BaseShape):
    """Drafts until the entropy at a level's best node exceeds the request's threshold.

    Lossless under strict acceptance: the threshold depends on committed tokens and their draft
    distributions alone, not on future draws of the target.
    """

    running: Running
    between: str
    keep_last: bool

    def threshold(self, memory: Tensor) -> Tensor:
        """`[B]` float64, nats."""
        means, known = self.running.means(memory), self.running.known(memory)
        if self.between == "rejected":
            return means[:, 1].where(known[:, 1], torch.inf)
        return means.mean(1).where(known.all(1), torch.inf)

    def begin(self, start: RoundStart) -> Plan:
        plan = super().begin(start)
        return ThresholdPlan(plan.num_rows, plan.max_depth, threshold=self.threshold(start.memory))

    def grow(self, plan: Plan, level: Level) -> Frontier:
        best = best_of_level(level, self.width)
        stop_rows(plan, level, self._ends(plan, level.pool, best[:, 0], level.depth))
        return rows_below(plan, level, best)

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        if not self.keep_last:
            pool = pool._replace(joint_logp=self._without_last(plan, pool))
        return best_nodes(pool, self.max_tokens)

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        entropy = gather(outcome.pool.entropy, outcome.submitted, 0.0)
        return self.running.noted(memory, samples_of(entropy, outcome))

    def _ends(self, plan: Plan, pool: DraftPool, node: Tensor, depth: Tensor | int) -> Tensor:
        """`[B]` bool: drafting ends at the level of this best node."""
        threshold = cast(ThresholdPlan, plan).threshold
        assert threshold is not None
        uncertain = pool.entropy.gather(1, node[:, None])[:, 0].double() > threshold
        return uncertain & torch.as_tensor(depth >= (1 if self.keep_last else 2))

    def _without_last(self, plan: Plan, pool: DraftPool) -> Tensor:
        """`[B, P]`: scores, -inf in the deepest level of rows that stopped there."""
        depth = pool.depth.masked_fill(~pool.valid, 0)
        deepest = depth.amax(1, keepdim=True)
        in_level = (depth == deepest) & pool.valid
        best = pool.joint_logp.masked_fill(~in_level, -torch.inf).argmax(1)
        ended = self._ends(plan, pool, best, deepest[:, 0])
        return pool.joint_logp.masked_fill(in_level & ended[:, None], -torch.inf)


def entropy_stop_shape(record: EntropyStop, device: Device) -> EntropyStopShape:
    size = (record.window, record.top_k, record.top_k, record.num_tokens or record.window + 1)
    return EntropyStopShape(
        *size,
        device,
        memory_size=MEMORY_SIZE,
        running=Running(record.min_samples),
        between=record.between,
        keep_last=record.keep_last,
    )


ADASD_STOP = ShapeFamily(
    record=EntropyStop,
    rule=entropy_stop_shape,
    is_static=False,
    is_deep=False,
    is_timed=True,
    reads_entropy=True,
    is_ranked=lambda record: record.top_k == 1,
    kernel=None,
    # The threshold is the mean entropy of rejected tokens, from the first on (section 4.3).
    words={"adasd_stop": {}, "adasd-paper": {"between": "rejected", "min_samples": 1}},
    grids={"adasd_stop": grid(window=WINDOWS, between="midpoint rejected", min_samples="1 8")},
    chain=lambda record: record.model_copy(update={"top_k": 1, "num_tokens": None}),
    # A token's entropy is known before the token is drawn.
    withholds=lambda record: "drafts trees" if record.top_k > 1 else None,
)


# --------------------------------------------------------------------------- acceptance


class JensenShannon(Acceptance):
    """AdaSD's acceptance: match, or Jensen-Shannon distance below an online threshold. Lossy.

    Each request has its own threshold, midway between the mean distances of its accepted and first
    rejected tokens so far; below `min_samples` of each only matches are accepted.
    """

    kind: Literal["adasd_accept"] = "adasd_accept"
    min_samples: MinSamples = 8
    max_threshold: Probability = 1.0
    """Certified upper bound of the threshold, square root of bits; 0 accepts only matches."""
    deny_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens neither accepted nor replaced by distance (digits, tool-call marks), besides those
    that end a text."""


@dataclass
class JensenShannonRule:
    """Accepts a token that matches, or where drafter and target are close enough.

    Drafts are the drafter's top-k, so a child matches if it holds the target's drawn token, without
    a ratio p/q. If no child matches, the likeliest one may be accepted by distance.
    """

    record: JensenShannon
    denied: Tensor
    needs_draft_distribution = True
    samples_drafts = False
    memory_size = MEMORY_SIZE

    def __post_init__(self) -> None:
        self._running = Running(self.record.min_samples)

    def judge(self, given: Verification) -> Judgement:
        distance = distances(given)
        strict = follows(given.tree, given.target_ids)
        near = distance.double() < self.threshold(given.memory)[:, None]
        admitted = strict | (near & relaxable(given, strict, self.denied))
        return Judgement(admitted, given.target_ids, distance)

    def threshold(self, memory: Tensor) -> Tensor:
        """`[B]` float64, square root of bits; 0 below `min_samples`."""
        means, known = self._running.means(memory), self._running.known(memory)
        value = means.mean(1).where(known.all(1), 0.0)
        return value.clamp(max=self.record.max_threshold)

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        assert outcome.evidence is not None
        return self._running.noted(memory, samples_of(outcome.evidence, outcome))


def jensen_shannon_rule(
    record: JensenShannon, device: Device, eos_ids: Collection[int]
) -> JensenShannonRule:
    return JensenShannonRule(record, denied_ids(record.deny_token_ids, eos_ids, device))


def distances(given: Verification) -> Tensor:
    """`[B, N]` float32, square root of bits: distance of the processed distributions of drafter and
    target at each node's parent; arbitrary at the root and in empty slots."""
    assert given.drafted_from is not None
    drafted = given.drafted_from.logits.float().log_softmax(-1)
    parent = given.tree.parent.clamp(min=0)[..., None]
    own = given.processed.gather(1, parent.expand(-1, -1, given.processed.shape[2]))
    target = own.float().log_softmax(-1).flatten(0, 1)
    found = js_distance(drafted.flatten(0, 1), target, given.drafted_from.target_ids)
    return found.view(given.tree.parent.shape)


LOWEST_LOGP = -1e4
"""Replaces log 0: its exponential is 0, and 0 times it is 0."""


def js_distance(draft_logp: Tensor, target_logp: Tensor, target_ids: Tensor) -> Tensor:
    """Jensen-Shannon distance of two next-token distributions (arXiv:2512.11280, 4.4).

    With q the drafter's distribution spread over the target's vocabulary, p the target's and
    m = (p + q) / 2, the distance is sqrt(sum(p log2(p / m)) / 2 + sum(q log2(q / m)) / 2): 0 for
    equal distributions, 1 for disjoint ones. A token outside the draft vocabulary has q = 0 and
    m = p / 2, so all of them together add log 2 times their mass under p.

    Args:
        draft_logp: `[R, Vd]` float, natural log. target_logp: `[R, V]`.
        target_ids: `[Vd]` int64, distinct.

    Returns:
        `[R]` float32 in [0, 1], square root of bits.
    """
    draft = draft_logp.float().clamp(min=LOWEST_LOGP)
    target = target_logp.float()[:, target_ids].clamp(min=LOWEST_LOGP)
    q, p = draft.exp(), target.exp()
    middle = ((p + q) / 2).log().clamp(min=LOWEST_LOGP)
    shared = p * (target - middle) + q * (draft - middle)
    nats = shared.sum(-1)
    if len(target_ids) < target_logp.shape[1]:
        # Indexing by a mask would wait for the device.
        outside = target_logp.float().index_fill(1, target_ids, -math.inf).exp().sum(-1)
        nats = nats + outside * math.log(2)
    return (nats / (2 * math.log(2))).clamp(0, 1).sqrt()


def relaxable(given: Verification, matched: Tensor, denied: Tensor) -> Tensor:
    """`[B, N]` bool: nodes that a rule may accept in place of the target's token.

    These are likeliest children without a sibling in `matched` `[B, N]`, if neither they nor the
    tokens they would replace are in `denied` `[K]`.
    """
    tree = given.tree
    wanted = gather(given.target_ids, tree.parent, -1)
    forbidden = torch.isin(tree.token_ids, denied) | torch.isin(wanted, denied)
    # Slots ascend with the sibling rank, so the earliest child is the likeliest.
    likeliest = (tree.parent >= 0) & ~earlier_siblings(tree).any(-1)
    return likeliest & ~of_parent(has_child(tree, matched), tree) & ~forbidden


ADASD_ACCEPT = AcceptanceFamily(
    record=JensenShannon,
    rule=jensen_shannon_rule,
    is_lossless=False,
    words={"adasd_accept": {}, "adasd-accept-paper": {"min_samples": 1}},
)
