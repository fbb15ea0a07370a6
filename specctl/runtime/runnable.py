"""Whether a policy can be run with a drafter, and what decides for it then."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from specctl.errors import UsageError
from specctl.policy import Policy, build_acceptance, build_budget, build_shape, policy_digest
from specctl.policy.rules import BudgetRule, ShapeRule
from specctl.policy.verification import AcceptanceRule
from specctl.runtime.decisions import Decisions, decided_by
from specctl.runtime.drafter import Drafter


@dataclass(frozen=True)
class Runnable:
    """What decides for a policy.

    Attributes:
        drafter: that it needs: none for plain decoding.
        digest: of the policy.
        fallback: what takes a round over if these rules fail; None where failures are not caught.
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
        decisions: what computes what the shape learned; see `decisions`.

    Raises:
        UsageError: a part that this version cannot decide, a policy that drafts without a
            drafter or with one on another device, a draft vocabulary smaller than top_k, a budget
            that cannot be decided or is smaller than the batch, or decisions that are not to be
            had here.
    """
    shape = decided_by(decisions, policy.shape, build_shape(policy.shape, device), device)
    budget = build_budget(
        policy.budget, batch_size=batch_size, max_tokens=shape.max_tokens, device=device
    )
    acceptance = build_acceptance(policy.acceptance, device, eos_ids=eos_ids)
    wanted = _wanted_drafter(shape, drafter, device)
    return Runnable(shape, budget, acceptance, wanted, policy_digest(policy))


def _wanted_drafter(
    shape: ShapeRule, drafter: Drafter | None, device: torch.device
) -> Drafter | None:
    if shape.max_depth == 0:
        return None
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
    return drafter
