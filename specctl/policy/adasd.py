"""AdaSD: drafts that stop, and verification that relaxes, by thresholds learned while decoding.

Both parts stand alone: the stop under strict acceptance is lossless (the paper's Gen-Only), the
acceptance behind a fixed chain is its Verify-Only (arXiv:2512.11280; readings in docs/adasd.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from specctl.divergence import js_distance
from specctl.features import DraftPool
from specctl.policy.records import EntropyStop, JensenShannon
from specctl.policy.relaxation import denied_ids, relaxable
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
from specctl.policy.running import MEMORY_SIZE, Running, samples_of
from specctl.policy.verification import Judgement, Outcome, StrictAcceptance, Verification
from specctl.tree import gather


@dataclass
class ThresholdPlan(Plan):
    """A round whose threshold was settled by the rounds before it.

    Attributes:
        threshold: `[B]` float64, infinite where too little is known.
    """

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
            pool = replace(pool, joint_logp=self._without_last(plan, pool))
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
        depth = pool.tree.depth.masked_fill(~pool.tree.valid, 0)
        deepest = depth.amax(1, keepdim=True)
        in_level = (depth == deepest) & pool.tree.valid
        best = pool.joint_logp.masked_fill(~in_level, -torch.inf).argmax(1)
        ended = self._ends(plan, pool, best, deepest[:, 0])
        return pool.joint_logp.masked_fill(in_level & ended[:, None], -torch.inf)


def entropy_stop_shape(record: EntropyStop, device: torch.device) -> EntropyStopShape:
    """The rule of AdaSD's drafting."""
    return EntropyStopShape(
        max_depth=record.window,
        top_k=record.top_k,
        width=record.top_k,
        max_tokens=record.num_tokens or record.window + 1,
        device=device,
        memory_size=MEMORY_SIZE,
        running=Running(record, device),
        between=record.between,
        keep_last=record.keep_last,
    )


Pull = Callable[[Tensor, Tensor, Tensor], Tensor]
"""How strongly each mean counts, `[B, 2]`, from counts of tokens, of sequences, and the means."""
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
    device: torch.device
    lossless = False
    needs_draft_law = True
    memory_size = MEMORY_SIZE + 2

    def __post_init__(self) -> None:
        self._running = Running(self.record, self.device)
        self._pull = VARIANTS[self.record.variant]

    def judge(self, given: Verification) -> Judgement:
        distance = distances(given)
        strict = StrictAcceptance().admit(given.tree, given.target_ids)
        near = distance.double() < self.threshold(given.memory)[:, None]
        admitted = strict | (near & relaxable(given, strict, self.denied))
        return Judgement(admitted, given.target_ids, distance)

    def threshold(self, memory: Tensor) -> Tensor:
        """`[B]` float64, square root of bits; 0 while too little is known."""
        mine, sequences = memory[:, :MEMORY_SIZE], memory[:, MEMORY_SIZE:]
        means, tokens = self._running.means(mine), self._running.counts(mine)
        pull = self._pull(tokens, sequences + (tokens - mine[:, :2]), means)
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
    """The rule of AdaSD's acceptance.

    Args:
        eos_ids: tokens that end a text, denied like the record's.
    """
    return JensenShannonRule(record, denied_ids(record.deny_token_ids, eos_ids, device), device)


def distances(given: Verification) -> Tensor:
    """Jensen-Shannon distance of drafter and target where each node was drawn.

    Both laws are those after temperature, top-k and top-p.

    Returns:
        `[B, N]` float32, square root of bits; meaningless at the root and in empty slots.
    """
    assert given.draft_law is not None
    drafted = given.draft_law.logits.float().log_softmax(-1)
    parent = given.tree.parent.clamp(min=0)[..., None]
    law = given.law.gather(1, parent.expand(-1, -1, given.law.shape[2])).float().log_softmax(-1)
    found = js_distance(drafted.flatten(0, 1), law.flatten(0, 1), given.draft_law.target_ids)
    return found.view(given.tree.parent.shape)
