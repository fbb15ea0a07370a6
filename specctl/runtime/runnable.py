"""Whether a policy can be run with a drafter, and what decides for it then."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specctl.errors import UsageError
from specctl.policy import Policy, build_shape
from specctl.policy.build import build_budget
from specctl.policy.rules import BudgetRule, ShapeRule
from specctl.runtime.drafter import Drafter


@dataclass(frozen=True)
class Runnable:
    """What decides for a policy, and the drafter that it needs: none for plain decoding."""

    shape: ShapeRule
    budget: BudgetRule
    drafter: Drafter | None


def runnable(
    policy: Policy, drafter: Drafter | None, device: torch.device, batch_size: int = 1
) -> Runnable:
    """The rules of a policy's shape and budget for that many requests together.

    Raises:
        UsageError: a part that this version cannot decide, a policy that drafts without a
            drafter, a draft vocabulary smaller than top_k, or a budget that cannot be decided
            or is smaller than the batch.
    """
    shape = build_shape(policy.shape, device)
    budget = build_budget(
        policy.budget, batch_size=batch_size, max_tokens=shape.max_tokens, device=device
    )
    if shape.max_depth == 0:
        return Runnable(shape, budget, None)
    if drafter is None:
        raise UsageError(
            "policy that drafts", expected="a drafter", found="none", fix="give --drafter"
        )
    if shape.top_k > drafter.vocab_size:
        raise UsageError(
            "top_k",
            expected=f"at most the draft vocabulary, {drafter.vocab_size}",
            found=str(shape.top_k),
            fix="lower top_k",
        )
    return Runnable(shape, budget, drafter)
