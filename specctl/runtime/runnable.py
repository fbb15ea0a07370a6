"""The rules of a policy, ready to run with a drafter on a device, and what happens if they fail.

A policy's faults end at its border: the round goes on by a static plan, and is counted. Nothing has
been drawn from the target when a shape or a budget decides, so whichever nodes are submitted
instead, the text is the same; only the round is not the policy's. Drafts that were drawn from the
drafter are the exception: they are verified as far as they came.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from specctl.errors import UsageError, check_choice
from specctl.features import DraftPool
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
    Frontier,
    Level,
    Plan,
    RoundStart,
    ShapeRule,
    best_nodes,
)
from specctl.policy.verification import AcceptanceRule, Outcome
from specctl.runtime.config import Decisions
from specctl.runtime.drafter import Drafter

FaultKind = Literal["exception", "nan", "late"]
FALLBACK = StaticTree(depth=6, top_k=8, num_tokens=48)
"""The plan that takes over, as far as the failed policy's own limits reach."""
log = logging.getLogger("specctl.policy")
Given = ParamSpec("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Runnable:
    """The rules of a policy.

    Attributes:
        drafter: that it needs: none for plain decoding.
        digest: of the policy.
        fallback: takes a round over if these rules fail; None where failures are not caught.
    """

    shape: ShapeRule
    budget: BudgetRule
    acceptance: AcceptanceRule
    drafter: Drafter | None
    digest: str
    fallback: Runnable | None = None


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
        raise UsageError(
            "policy that drafts", expected="a drafter", found="none", fix="give --drafter"
        )
    if drafter.device != device:
        raise UsageError(
            "drafter",
            expected=f"the target's device, {device}",
            found=str(drafter.device),
            fix="move one of them",
        )
    if shape.top_k > drafter.vocab_size:
        raise UsageError(
            "top_k",
            expected=f"at most the draft vocabulary, {drafter.vocab_size}",
            found=str(shape.top_k),
            fix="lower top_k",
        )
    return found


def check_decisions(word: str) -> Decisions:
    """One of the words of `Decisions`.

    Raises:
        UsageError: another word.
    """
    check_choice("decisions", word, get_args(Decisions))
    return word  # type: ignore[return-value]


class PolicyFault(Exception):  # noqa: N818  it is a fault of the policy, not an error of ours
    """A rule failed. Never leaves the runtime: the round is done again by a static plan."""

    def __init__(self, kind: FaultKind, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind: FaultKind = kind


@contextmanager
def raising_faults() -> Iterator[None]:
    """Turns every failure inside into the policy's fault, but for memory that runs out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise PolicyFault("exception", f"{type(error).__name__}: {error}") from error


@dataclass
class Faults:
    """Rounds of a loop that a static plan took over: `counts` by cause, `last` in words."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FaultKind), 0))
    last: str | None = None

    @property
    def total(self) -> int:
        """Such rounds, of all causes."""
        return sum(self.counts.values())

    def note(self, fault: PolicyFault) -> None:
        """Counts it; the first of each kind is logged."""
        self.counts[fault.kind] += 1
        self.last = str(fault)
        if self.counts[fault.kind] == 1:
            log.warning("policy fault, static plan for the round: %s", fault)


class GuardedShape:
    """A shape whose failures are `PolicyFault`s; bounds and settings are the rule's own.

    Attributes:
        deadline_us: wall time that the policy's decisions of one round may take together; None for
            any.
        fault: the round's failure that ended its draft; None for none.
    """

    fault: PolicyFault | None = None

    def __init__(self, rule: ShapeRule, deadline_us: float | None) -> None:
        self.rule, self.deadline_us, self.spent_us = rule, deadline_us, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def call(
        self, decide: Callable[Given, Found], *given: Given.args, **named: Given.kwargs
    ) -> Found:
        """A rule's decision.

        Raises:
            PolicyFault: it raised, or the round's decisions are late.
        """
        began = time.perf_counter()
        with raising_faults():
            found = decide(*given, **named)
        self.spent_us += 1e6 * (time.perf_counter() - began)
        if self.deadline_us is not None and self.spent_us > self.deadline_us:
            raise PolicyFault("late", f"{self.spent_us:.0f} us of {self.deadline_us:g} us allowed")
        return found

    def begin(self, start: RoundStart) -> Plan:
        self.spent_us = 0.0
        return self.call(self.rule.begin, start)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        return self.call(self.rule.grow, plan, level)

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        submitted = self.call(self.rule.select, plan, pool)
        unsound = self.call(self.rule.unsound, plan)
        if unsound is not None and bool(unsound.any()):
            raise PolicyFault("nan", f"a score is not a number in {int(unsound.sum())} requests")
        return submitted

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        self.spent_us = 0.0  # its round is over: what is late now delays no decision of it
        return self.call(self.rule.observe, memory, outcome)


class GuardedDraws(GuardedShape):
    """The same of drafts that were drawn, which must be verified whatever fails then: a second
    draft in their place would keep those from the target that a failure followed. The round submits
    what was drawn so far; only one that fails before it draws is a static plan's."""

    def begin(self, start: RoundStart) -> Plan:
        self.fault = None
        return super().begin(start)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        try:
            return super().grow(plan, level)
        except PolicyFault as fault:
            self.fault = fault
            last = torch.zeros_like(level.pool.tree.parent[:, :1]) + level.start
            return Frontier(last, torch.zeros_like(last, dtype=torch.bool))

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        if self.fault is None:
            try:
                return super().select(plan, pool)
            except PolicyFault as fault:
                self.fault = fault
        return best_nodes(pool, self.rule.max_tokens)


@dataclass(frozen=True)
class GuardedBudget:
    """A budget whose failures are `PolicyFault`s, within the time of its round's shape."""

    rule: BudgetRule
    shape: GuardedShape

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        return self.shape.call(self.rule.share, plan, pool, submitted)


def guarded(
    policy: Policy, rules: Runnable, batch_size: int, deadline_us: float | None = None
) -> Runnable:
    """The same rules, whose failures raise `PolicyFault`, and the fallback for that case."""
    static = fallback_policy(policy, rules.shape, batch_size)
    if static is None:
        return rules
    device = rules.drafter.device if rules.drafter is not None else torch.device("cpu")
    fallback = runnable(static, rules.drafter, device, batch_size)
    drawn = rules.acceptance.samples_drafts  # whose budget shares nothing
    shape = (GuardedDraws if drawn else GuardedShape)(rules.shape, deadline_us)
    return replace(
        rules,
        shape=shape,
        budget=rules.budget if drawn else GuardedBudget(rules.budget, shape),
        fallback=replace(fallback, acceptance=rules.acceptance),
    )


def fallback_policy(policy: Policy, shape: ShapeRule, batch_size: int) -> Policy | None:
    """EAGLE-2's tree within the limits of the policy's own trees, so that memory suffices.

    A budget's limit is kept by giving every slot the same part of it. None where a policy never
    submits more than roots: there is nothing smaller.
    """
    limit = getattr(policy.budget, "max_tokens", None)
    most = shape.max_tokens if limit is None else min(shape.max_tokens, limit // batch_size)
    depth = min(FALLBACK.depth, shape.max_depth, most - 1)
    top_k = min(FALLBACK.top_k, shape.top_k, shape.width)
    if depth < 1:
        return None
    if top_k == 1:
        return Policy(shape=Chain(num_draft_tokens=depth))
    size = min(most, FALLBACK.num_tokens)
    return Policy(shape=StaticTree(depth=depth, top_k=top_k, num_tokens=size))
