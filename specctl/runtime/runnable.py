"""The rules of a policy, ready to run with a drafter on a device, and what happens if they fail.

A failure of a policy ends at its border: a static plan drafts the round again, and it is counted.
Nothing has been drawn from the target when a shape or a budget decides, so whichever nodes are
submitted instead, the text is the same; only the round is not the policy's. Drafts that were drawn
from the drafter must be verified whatever fails then: their static plan is the policy's longest
chain, and its draws are those of before, as noise follows from seed and position.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from specctl.errors import UsageError, check_choice
from specctl.policy import (
    Chain,
    Policy,
    StaticTree,
    build_acceptance,
    build_budget,
    build_shape,
    policy_digest,
)
from specctl.policy.rules import (
    BudgetRule,
    Plan,
    ShapeRule,
)
from specctl.policy.verification import AcceptanceRule
from specctl.runtime.capture import is_capturing
from specctl.runtime.config import Decisions
from specctl.runtime.drafter import Drafter
from specctl.tree import DraftPool

FALLBACK = StaticTree(depth=6, top_k=8, num_tokens=48)
"""The plan that takes over, as far as the failed policy's own limits reach."""
log = logging.getLogger("specctl.policy")


@dataclass(frozen=True)
class Runnable:
    """The rules of a policy."""

    shape: ShapeRule
    budget: BudgetRule
    acceptance: AcceptanceRule
    drafter: Drafter | None  # that it needs: none for plain decoding
    digest: str  # of the policy
    fallback: Runnable | None = None
    """Takes a round over if these rules fail; None where failures are not caught."""


def runnable(
    policy: Policy,
    drafter: Drafter | None,
    device: torch.device,
    batch_size: int = 1,
    eos_ids: Collection[int] = (),
    decisions: Decisions = "auto",
) -> Runnable:
    """The rules of a policy for that many requests together.

    Args:
        eos_ids: tokens that end a text.

    Raises:
        UsageError: a part that this version cannot decide, a policy that drafts without a
            drafter or with one on another device, a draft vocabulary smaller than top_k, a budget
            that cannot be decided or is smaller than the batch, or decisions that are not to be
            had here.
    """
    shape = build_shape(policy.shape, device)
    if check_decisions(decisions) == "onnx":
        from specctl.runtime.twins import by_twin

        shape = by_twin(policy.shape, shape, device)
    budget = build_budget(
        policy.budget, batch_size=batch_size, max_tokens=shape.max_tokens, device=device
    )
    acceptance = build_acceptance(policy.acceptance, device, eos_ids=eos_ids)
    found = Runnable(shape, budget, acceptance, drafter, policy_digest(policy))
    if shape.max_depth == 0:
        return replace(found, drafter=None)
    if drafter is None:
        raise UsageError("the policy drafts, and there is no drafter; give --drafter")
    if drafter.device != device:
        raise UsageError(
            f"the drafter is on {drafter.device}, the target on {device}; move one of them"
        )
    if shape.top_k > drafter.vocab_size:
        raise UsageError(f"top_k {shape.top_k} exceeds the draft vocabulary, {drafter.vocab_size}")
    return found


def check_decisions(word: str) -> Decisions:
    """One of the words of `Decisions`."""
    check_choice("decisions", word, get_args(Decisions))
    return word  # type: ignore[return-value]


def selected(shape: ShapeRule, plan: Plan, pool: DraftPool) -> Tensor:
    """The nodes that a shape submits."""
    submitted, unsound = shape.select(plan, pool), shape.unsound(plan)
    if unsound is not None and bool(unsound.any()):
        raise ArithmeticError(not_a_number(int(unsound.sum())))
    return submitted


def not_a_number(num_requests: int) -> str:
    """What is wrong with scores that are NaN."""
    return f"a score is not a number in {num_requests} requests"


@dataclass
class Faults:
    """Failures of a loop's policies, in place of which a static plan went on."""

    total: int = 0  # how many there were
    last: str | None = None  # the last one in words

    @contextmanager
    def caught(self, *but: type[Exception]) -> Iterator[None]:
        """Counts a failure inside and ends it there, but for some kinds; one of torch while a CUDA
        graph is captured is the capture's, which must not end as if it had recorded all."""
        try:
            yield
        except but:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and is_capturing():
                raise
            self.note(f"{type(error).__name__}: {error}")

    def note(self, reason: str) -> None:
        """Counts a failure; the first is logged."""
        self.total, self.last = self.total + 1, reason
        if self.total == 1:
            log.warning("policy fault, static plan for the round: %s", reason)


def with_fallback(policy: Policy, rules: Runnable, batch_size: int) -> Runnable:
    """The same rules, and the fallback for rounds in which they fail."""
    static = fallback_policy(policy, rules, batch_size)
    if static is None:
        return rules
    device = rules.drafter.device if rules.drafter is not None else torch.device("cpu")
    fallback = runnable(static, rules.drafter, device, batch_size)
    return replace(rules, fallback=replace(fallback, acceptance=rules.acceptance))


def fallback_policy(policy: Policy, rules: Runnable, batch_size: int) -> Policy | None:
    """EAGLE-2's tree within the limits of the policy's own trees, so that memory suffices; of drawn
    drafts the longest chain.

    A budget's limit is kept by giving every slot the same part of it. None where a policy never
    submits more than roots: there is nothing smaller.
    """
    shape, limit = rules.shape, getattr(policy.budget, "max_tokens", None)
    if rules.acceptance.samples_drafts:
        return Policy(shape=Chain(num_draft_tokens=shape.max_depth))
    most = shape.max_tokens if limit is None else min(shape.max_tokens, limit // batch_size)
    depth = min(FALLBACK.depth, shape.max_depth, most - 1)
    top_k = min(FALLBACK.top_k, shape.top_k, shape.width)
    if depth < 1:
        return None
    if top_k == 1:
        return Policy(shape=Chain(num_draft_tokens=depth))
    size = min(most, FALLBACK.num_tokens)
    return Policy(shape=StaticTree(depth=depth, top_k=top_k, num_tokens=size))
