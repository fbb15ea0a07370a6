"""AdaSD: drafts that stop, and verification that relaxes, by thresholds learned while decoding.

Both parts stand alone: the stop under strict acceptance is lossless (the paper's Gen-Only), the
acceptance behind a fixed chain is its Verify-Only (arXiv:2512.11280; readings in docs/adasd.md).

In a round the tokens on the accepted path and the first rejected one count towards the request's
two running means; the nodes behind it were never tested."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from specctl.lazy import Tensor, torch
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
from specctl.records import Probability, Record, require
from specctl.tree import DraftPool, TokenTree, gather


class RunningMeans(Record):
    """Start and forgetting of the means."""

    min_samples: Annotated[int, Field(ge=0)] = 8
    """Accepted and rejected tokens to see before the rule acts."""
    half_life: Annotated[float, Field(gt=0)] | None = None
    """Tokens of a class after which one of them weighs half. None never forgets, as in the
    paper."""


MEMORY_SIZE = 6
"""Tokens seen, their weight, and the weighted sum of their values: each accepted, then rejected."""


@dataclass(frozen=True)
class Samples:
    """The samples of a round, `[B, D + 1]` each: float64 values on the accepted path and of the
    first rejected token, and bool, which of them count, and as what."""

    values: Tensor
    accepted: Tensor
    rejected: Tensor


class Running:
    """The arithmetic of the two means over memories `[B, 6]` float64."""

    def __init__(self, record: RunningMeans) -> None:
        self._min_samples = max(record.min_samples, 1)  # nothing has no mean
        self._fade = 1.0 if record.half_life is None else 0.5 ** (1 / record.half_life)

    def means(self, memory: Tensor) -> Tensor:
        """`[B, 2]` mean accepted and mean rejected value; NaN where there is nothing to mean."""
        _, weight, total = self._columns(memory)
        return total / weight

    def known(self, memory: Tensor) -> Tensor:
        """`[B, 2]` bool: enough of the class was seen for its mean to be used."""
        return self._columns(memory)[0] >= self._min_samples

    def noted(self, memory: Tensor, samples: Samples) -> Tensor:
        """The memories after a round, `[B, 6]`."""
        seen, weight, total = self._columns(memory)
        chosen = torch.stack([samples.accepted, samples.rejected], 1)
        count = chosen.sum(2)
        added = torch.where(chosen, samples.values[:, None], 0.0).sum(2)
        fade = self._fade**count
        return torch.cat([seen + count, weight * fade + count, total * fade + added], 1)

    @staticmethod
    def _columns(memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return memory[:, 0:2], memory[:, 2:4], memory[:, 4:6]


def samples_of(values: Tensor, outcome: Outcome) -> Samples:
    """The samples of a round; `values` is `[B, N]`, of the submitted nodes."""
    path = outcome.path[:, 1:]
    tested = torch.cat([path, first_rejected(outcome.tree, outcome.path)[:, None]], 1)
    exists = tested >= 0
    is_last = torch.arange(tested.shape[1], device=tested.device) == tested.shape[1] - 1
    return Samples(gather(values, tested, 0).double(), exists & ~is_last, exists & is_last)


def first_rejected(tree: TokenTree, path: Tensor) -> Tensor:
    """`[B]` int64: first of the nodes that were submitted behind the accepted path; -1 for none.

    Siblings come from one distribution, so which of them stands for all does not matter to the
    values that are measured there.
    """
    deepest = (path >= 0).sum(1, keepdim=True) - 1
    behind = tree.parent == path.gather(1, deepest)
    found, index = behind.to(torch.int8).max(1)
    return index.masked_fill(found == 0, -1)


# --------------------------------------------------------------------------- drafting


class EntropyStop(RunningMeans, Shape):
    """AdaSD's drafting rule: stop behind a token whose draft entropy exceeds an online threshold.

    The threshold is the request's own, in nats, from the entropies that verification accepted and
    rejected in its earlier rounds; it is infinite until `min_samples` of each were seen.
    """

    always_reads: ClassVar = ("parent_entropy",)
    kind: Literal["adasd_stop"] = "adasd_stop"
    window: Depth = 20  # draft levels at most (the paper: 20)
    top_k: TopK = 1
    """1 for chains. More grows an EAGLE-2 tree, whose rows stop by the entropy that the best node
    of a level was drawn with."""
    num_tokens: NumTokens | None = None
    """Nodes submitted, root counted; all of a chain, and needed by a tree."""
    between: Literal["midpoint", "rejected"] = "midpoint"
    """`midpoint` of mean accepted and mean rejected entropy, or `rejected`, the mean rejected
    entropy itself (the paper's section 4.3)."""
    keep_last: bool = True
    """Submit the uncertain token too and stop behind it (paper text); false leaves it out, but
    never the first token of a round."""

    @model_validator(mode="after")
    def _sized(self) -> Self:
        chain, size = self.top_k == 1, self.num_tokens
        require(chain == (size is None), "num_tokens goes with top_k above 1, and needs it")
        require(size is None or size > self.window, "num_tokens must exceed window")
        return self


@dataclass
class ThresholdPlan(Plan):
    """Also `[B]` float64 thresholds of earlier rounds, infinite where too little is known."""

    threshold: Tensor | None = None


@dataclass(kw_only=True)
class EntropyStopShape(BaseShape):
    """Drafts until a level's best node was drawn with more entropy than the request's threshold.

    Lossless under strict acceptance: the threshold depends on committed tokens and on what the
    drafter said of them, never on a draw of the target that is still to be used.
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
        """`[B]` bool: the row's drafting ends with the level whose best node this is."""
        threshold = cast(ThresholdPlan, plan).threshold
        assert threshold is not None
        uncertain = pool.entropy.gather(1, node[:, None])[:, 0].double() > threshold
        return uncertain & torch.as_tensor(depth >= (1 if self.keep_last else 2))

    def _without_last(self, plan: Plan, pool: DraftPool) -> Tensor:
        """`[B, P]` scores, -inf in the deepest level of the rows that it ended."""
        depth = pool.depth.masked_fill(~pool.valid, 0)
        deepest = depth.amax(1, keepdim=True)
        in_level = (depth == deepest) & pool.valid
        best = pool.joint_logp.masked_fill(~in_level, -torch.inf).argmax(1)
        ended = self._ends(plan, pool, best, deepest[:, 0])
        return pool.joint_logp.masked_fill(in_level & ended[:, None], -torch.inf)


def entropy_stop_shape(record: EntropyStop, device: torch.device) -> EntropyStopShape:
    size = (record.window, record.top_k, record.top_k, record.num_tokens or record.window + 1)
    return EntropyStopShape(
        *size,
        device,
        memory_size=MEMORY_SIZE,
        running=Running(record),
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
    # The threshold is the mean entropy of rejected tokens, from the first one on (section 4.3).
    words={"adasd_stop": {}, "adasd-paper": {"between": "rejected", "min_samples": 1}},
    grids={"adasd_stop": grid(window=WINDOWS, between="midpoint rejected", min_samples="1 8")},
    chain=lambda record: record.model_copy(update={"top_k": 1, "num_tokens": None}),
    # The entropy that a token is drawn with is known before the token is.
    withholds=lambda record: "drafts trees" if record.top_k > 1 else None,
)


# --------------------------------------------------------------------------- acceptance


class JensenShannon(RunningMeans, Acceptance):
    """AdaSD's acceptance: match, or Jensen-Shannon distance below an online threshold. Lossy.

    The threshold is the request's own, from the distances of accepted and first rejected tokens in
    its earlier rounds; until `min_samples` of each were seen only matches are accepted.
    """

    kind: Literal["adasd_accept"] = "adasd_accept"
    max_threshold: Probability = 1.0
    """Certified clip, square root of bits, in [0, 1]; 0 accepts matches alone."""
    variant: Literal["base", "A", "B", "C"] = "base"
    """With means a and r of accepted and rejected distances, N tokens and C sequences of each
    kind: `base` (a + r) / 2; `A` a; `B` (N_a a + N_r r) / (N_a + N_r); `C` the same with C for N
    (the paper's appendix B)."""
    deny_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Neither accepted nor skipped on a distance (digits, tool-call marks); the ids that end a
    text are always among them."""


Pull = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Weights of the two means, `[B, 2]`, from counts of tokens, of sequences, and the means."""


VARIANTS: dict[str, Pull] = {
    "base": lambda tokens, sequences, means: torch.ones_like(means),
    "A": lambda tokens, sequences, means: means.new_tensor([1.0, 0.0]).expand_as(means),
    "B": lambda tokens, sequences, means: tokens,
    "C": lambda tokens, sequences, means: sequences,
}


@dataclass
class JensenShannonRule:
    """A token is accepted where it matches, or where drafter and target are close enough.

    Drafts are the drafter's top-k, not draws from it, so no ratio p/q decides under sampling: the
    target's token is drawn, and a child that holds it matches. Of the rest only the likeliest child
    of its parent may be accepted, and only where none of its siblings matches.
    """

    record: JensenShannon
    denied: Tensor
    needs_draft_law = True
    samples_drafts = False
    memory_size = MEMORY_SIZE + 2

    def __post_init__(self) -> None:
        self._running = Running(self.record)
        self._pull = VARIANTS[self.record.variant]

    def judge(self, given: Verification) -> Judgement:
        distance = distances(given)
        strict = follows(given.tree, given.target_ids)
        near = distance.double() < self.threshold(given.memory)[:, None]
        admitted = strict | (near & relaxable(given, strict, self.denied))
        return Judgement(admitted, given.target_ids, distance)

    def threshold(self, memory: Tensor) -> Tensor:
        """`[B]` float64, square root of bits; 0 while too little is known."""
        mine, sequences = memory[:, :MEMORY_SIZE], memory[:, MEMORY_SIZE:]
        means, tokens = self._running.means(mine), mine[:, :2]
        pull = self._pull(tokens, sequences, means)
        # What does not pull may be unknown: 0 · NaN would spoil the other.
        value = torch.where(pull > 0, pull * means, 0.0).sum(1) / pull.sum(1)
        known = self._running.known(mine).all(1)
        return value.where(known, 0.0).clamp(max=self.record.max_threshold)

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        assert outcome.evidence is not None
        samples = samples_of(outcome.evidence, outcome)
        noted = self._running.noted(memory[:, :MEMORY_SIZE], samples)
        held = torch.stack([samples.accepted.any(1), samples.rejected.any(1)], 1)
        return torch.cat([noted, memory[:, MEMORY_SIZE:] + held], 1)


def jensen_shannon_rule(
    record: JensenShannon, device: torch.device, eos_ids: Collection[int]
) -> JensenShannonRule:
    return JensenShannonRule(record, denied_ids(record.deny_token_ids, eos_ids, device))


def distances(given: Verification) -> Tensor:
    """`[B, N]` float32, square root of bits: distance of drafter and target where each node was
    drawn, after temperature, top-k and top-p; meaningless at the root and in empty slots."""
    assert given.draft_law is not None
    drafted = given.draft_law.logits.float().log_softmax(-1)
    parent = given.tree.parent.clamp(min=0)[..., None]
    law = given.law.gather(1, parent.expand(-1, -1, given.law.shape[2])).float().log_softmax(-1)
    found = js_distance(drafted.flatten(0, 1), law.flatten(0, 1), given.draft_law.target_ids)
    return found.view(given.tree.parent.shape)


LOWEST_LOGP = -1e4
"""Stands for log 0: its exponential is 0, and 0 times it is 0."""


def js_distance(draft_logp: Tensor, target_logp: Tensor, target_ids: Tensor) -> Tensor:
    """Jensen-Shannon distance of two next-token distributions (arXiv:2512.11280, 4.4).

    With q the drafter's distribution spread over the target's vocabulary, p the target's and
    m = (p + q) / 2, the distance is sqrt(sum(p log2(p / m)) / 2 + sum(q log2(q / m)) / 2): 0 for
    equal distributions, 1 for disjoint ones. A token that the drafter cannot say has q = 0 and
    m = p / 2, so it adds p · log 2: all of them together add log 2 times their mass under p.

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
        # A mask as index would be shorter, and wait for the device to count it.
        unsaid = target_logp.float().index_fill(1, target_ids, -math.inf).exp().sum(-1)
        nats = nats + unsaid * math.log(2)
    return (nats / (2 * math.log(2))).clamp(0, 1).sqrt()


def relaxable(given: Verification, matched: Tensor, denied: Tensor) -> Tensor:
    """Nodes that a rule may accept although they are not the target's own token.

    Of a node's children only the likeliest one, only where none of them is in `matched` `[B, N]`,
    and only if neither it nor the token that it would replace is in `denied` `[K]`.
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
