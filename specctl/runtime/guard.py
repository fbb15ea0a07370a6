"""A policy's faults end at its border: the round goes on by a static plan, and is counted.

Nothing has been drawn from the target when a shape or a budget decides, so whichever nodes are
submitted instead, the text is the same; only the round is not the policy's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from specctl.features import DraftPool
from specctl.policy import Chain, Policy, StaticTree
from specctl.policy.rules import BudgetRule, Frontier, Level, Plan, RoundStart, ShapeRule
from specctl.policy.verification import Outcome
from specctl.runtime.runnable import Runnable, runnable

Kind = Literal["exception", "nan", "late"]
FALLBACK = StaticTree(depth=6, top_k=8, num_tokens=48)
"""What takes over, as far as the failed policy's own limits reach."""

log = logging.getLogger("specctl.policy")
Given = ParamSpec("Given")
Found = TypeVar("Found")


class PolicyFault(Exception):  # noqa: N818  it is a fault of the policy, not an error of ours
    """A rule failed. Never leaves the runtime: the round is done again by a static plan."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind: Kind = kind


@contextmanager
def raising_faults() -> Iterator[None]:
    """Whatever fails inside is the policy's fault, but for memory that is not there."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise PolicyFault("exception", f"{type(error).__name__}: {error}") from error


@dataclass
class Faults:
    """Rounds of a loop that a static plan took over, by cause; the last one in words."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Kind), 0))
    last: str | None = None

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def note(self, fault: PolicyFault) -> None:
        """Counts it; the first of each kind is also told."""
        self.counts[fault.kind] += 1
        self.last = str(fault)
        if self.counts[fault.kind] == 1:
            log.warning("policy fault, static plan for the round: %s", fault)


@dataclass
class Border:
    """Calls into one policy's rules, timed by round.

    Attributes:
        deadline_us: wall time that its decisions of one round may take together; None for any.
    """

    deadline_us: float | None = None
    spent_us: float = 0.0

    def call(
        self, rule: Callable[Given, Found], *given: Given.args, **named: Given.kwargs
    ) -> Found:
        """What the rule says.

        Raises:
            PolicyFault: it raised, or the round's decisions are late.
        """
        began = time.perf_counter()
        with raising_faults():
            found = rule(*given, **named)
        self.spent_us += 1e6 * (time.perf_counter() - began)
        if self.deadline_us is not None and self.spent_us > self.deadline_us:
            raise PolicyFault("late", f"{self.spent_us:.0f} us of {self.deadline_us:g} us allowed")
        return found


class GuardedShape:
    """A shape whose failures are `PolicyFault`s; bounds and settings are the rule's own."""

    def __init__(self, rule: ShapeRule, border: Border) -> None:
        self.rule, self.border = rule, border

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def begin(self, start: RoundStart) -> Plan:
        self.border.spent_us = 0.0
        return self.border.call(self.rule.begin, start)

    def grow(self, plan: Plan, level: Level) -> Frontier:
        return self.border.call(self.rule.grow, plan, level)

    def select(self, plan: Plan, pool: DraftPool) -> Tensor:
        submitted = self.border.call(self.rule.select, plan, pool)
        unsound = self.border.call(self.rule.unsound, plan)
        if unsound is not None and bool(unsound.any()):
            raise PolicyFault("nan", f"a score is not a number in {int(unsound.sum())} requests")
        return submitted

    def observe(self, memory: Tensor, outcome: Outcome) -> Tensor:
        self.border.spent_us = 0.0  # its round is over: what is late now delays no decision of it
        return self.border.call(self.rule.observe, memory, outcome)


class GuardedBudget:
    """A budget whose failures are `PolicyFault`s, within the time of its round's shape."""

    def __init__(self, rule: BudgetRule, border: Border) -> None:
        self.rule, self.border = rule, border

    def share(self, plan: Plan, pool: DraftPool, submitted: Tensor) -> Tensor:
        return self.border.call(self.rule.share, plan, pool, submitted)


def guarded(
    policy: Policy, rules: Runnable, batch_size: int, deadline_us: float | None = None
) -> Runnable:
    """The same rules, whose failures raise `PolicyFault`, and what takes over then."""
    border = Border(deadline_us)
    static = fallback_policy(policy, rules.shape, batch_size)
    if static is None:
        return rules
    device = rules.shape.device
    fallback = replace(
        runnable(static, rules.drafter, device, batch_size), acceptance=rules.acceptance
    )
    return replace(
        rules,
        shape=GuardedShape(rules.shape, border),
        budget=GuardedBudget(rules.budget, border),
        fallback=fallback,
    )


def unguarded(rules: Runnable) -> Runnable:
    """The rules themselves, for who catches their failures otherwise."""
    shape, budget = (getattr(rule, "rule", rule) for rule in (rules.shape, rules.budget))
    return replace(rules, shape=shape, budget=budget)


def fallback_policy(policy: Policy, shape: ShapeRule, batch_size: int) -> Policy | None:
    """EAGLE-2's tree within what the policy's own trees may be, so that memory suffices.

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
