"""The rules of a policy, ready to run with a drafter on a device, their fallback, and the checks
before they may replace another policy's while requests are being decoded.

If a policy fails, a static plan drafts the round again, and the failure is counted. Shapes and
budgets decide before anything is drawn from the target, so the text is the same whichever nodes
are submitted. Tokens drawn from the drafter must be verified even after a failure: their static
plan is the policy's longest chain, and it draws the same tokens, as noise follows from seed and
position.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from specctl.errors import LossyPolicyError, UsageError, check_choice
from specctl.features import RECENT_TOKENS
from specctl.policy import (
    Chain,
    Policy,
    StaticTree,
    build_acceptance,
    build_budget,
    build_shape,
    policy_digest,
)
from specctl.policy.growing import grow_tree
from specctl.policy.rules import (
    BudgetRule,
    Frontier,
    Level,
    Plan,
    ShapeRule,
    fresh_start,
    is_closed,
)
from specctl.policy.verification import AcceptanceRule
from specctl.runtime.capture import is_capturing
from specctl.runtime.config import Decisions
from specctl.runtime.drafter import Drafter
from specctl.runtime.requests import Stopwatch
from specctl.tree import Children, DraftPool

FALLBACK = StaticTree(depth=6, top_k=8, num_tokens=48)
"""The fallback plan, cut to the limits of the failed policy."""
TYPICAL_PROBS = (0.6, 0.15)
"""Probability of the likeliest child in the two rows of a rehearsal."""
log = logging.getLogger("specctl.policy")


@dataclass(frozen=True)
class Runnable:
    """The rules of a policy."""

    shape: ShapeRule
    budget: BudgetRule
    acceptance: AcceptanceRule
    drafter: Drafter | None  # None for plain decoding
    digest: str  # of the policy
    fallback: Runnable | None = None  # for rounds in which these rules fail; None raises instead


def runnable(
    policy: Policy,
    drafter: Drafter | None,
    device: torch.device,
    batch_size: int = 1,
    eos_ids: Collection[int] = (),
    decisions: Decisions = "auto",
) -> Runnable:
    """The rules of a policy at a batch size.

    Args:
        eos_ids: tokens that end a text.

    Raises:
        UsageError: the drafter is missing, on another device, or has fewer tokens than top_k; the
            budget lacks costs or is smaller than the batch; or the decisions cannot run here.
    """
    shape = build_shape(policy.shape, device)
    check_choice("decisions", decisions, get_args(Decisions))
    if decisions == "onnx":
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
        raise UsageError("the policy drafts, and there is no drafter", hint="give --drafter")
    if drafter.device != device:
        raise UsageError(
            f"the drafter is on {drafter.device}, the target on {device}; move one of them"
        )
    if shape.top_k > drafter.vocab_size:
        raise UsageError(f"top_k {shape.top_k} exceeds the draft vocabulary, {drafter.vocab_size}")
    return found


def selected(shape: ShapeRule, plan: Plan, pool: DraftPool) -> Tensor:
    """The nodes that a shape submits; `ArithmeticError` if a score is NaN."""
    submitted, unsound = shape.select(plan, pool), shape.unsound(plan)
    if unsound is not None and bool(unsound.any()):
        raise ArithmeticError(not_a_number(int(unsound.sum())))
    return submitted


def not_a_number(num_requests: int) -> str:
    return f"a score is not a number in {num_requests} requests"


@dataclass
class Faults:
    """Failures of a loop's policies, each replaced by a static plan."""

    total: int = 0  # decisions that failed
    last: str | None = None  # the last one in words

    @contextmanager
    def caught(self, *but: type[Exception]) -> Iterator[None]:
        """Counts and suppresses failures inside, except some kinds, and errors of torch during a
        capture, which must fail as a whole."""
        try:
            yield
        except but:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and is_capturing():
                raise
            self.note(f"{type(error).__name__}: {error}")

    def note(self, reason: str) -> None:
        """Counts a failure and logs the first."""
        self.total, self.last = self.total + 1, reason
        if self.total == 1:
            log.warning("policy fault, static plan for the round: %s", reason)


def with_fallback(policy: Policy, rules: Runnable, batch_size: int) -> Runnable:
    static = fallback_policy(policy, rules, batch_size)
    if static is None:
        return rules
    device = rules.drafter.device if rules.drafter is not None else torch.device("cpu")
    fallback = runnable(static, rules.drafter, device, batch_size)
    return replace(rules, fallback=replace(fallback, acceptance=rules.acceptance))


def fallback_policy(policy: Policy, rules: Runnable, batch_size: int) -> Policy | None:
    """EAGLE-2's tree within the limits of the policy's own trees, so that memory suffices; for
    drawn drafts the longest chain.

    A budget is split equally over the slots. None for a policy that submits only roots.
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


# --------------------------------------------------------------------------- another policy


@dataclass(frozen=True)
class TreeRoom:
    """Memory for trees."""

    drafted: int  # cache entries behind a text for the largest draft
    submitted: int  # cache entries behind a text for the largest tree
    width: int  # nodes of a level

    def __or__(self, other: TreeRoom) -> TreeRoom:
        return TreeRoom(*map(max, astuple(self), astuple(other)))


def tree_room(shape: ShapeRule) -> TreeRoom:
    """Memory that trees of a shape need."""
    # Reading pads every row to the longest accepted path.
    drafted = shape.max_depth * shape.width + shape.max_depth + 1
    return TreeRoom(drafted, shape.max_tokens, shape.width)


def check_lossless(old: Policy, new: Policy) -> None:
    """Rejects a lossy policy in a lossless loop, which promised the target's text."""
    if old.lossless and not new.lossless:
        raise LossyPolicyError(
            f"reload: acceptance {new.acceptance.kind} is lossy, and the loop began with a "
            "lossless policy",
            hint="start another loop for it",
        )


def check_fits(rules: Runnable, drafter: Drafter | None, room: TreeRoom) -> None:
    """Rejects trees larger than the loop's memory, and drafting in a loop without a drafter."""
    if rules.drafter is not None and drafter is None:
        raise UsageError(
            f"reload: the policy drafts {rules.shape.max_depth} levels, and the loop began "
            "without a drafter",
            hint="start another loop for it",
        )
    needed = tree_room(rules.shape)
    if needed | room != room:
        raise UsageError(
            f"reload: trees of {needed.submitted} submitted tokens, {needed.width} nodes a "
            f"level and {needed.drafted} drafting slots do not fit the memory for "
            f"{room.submitted}, {room.width} and {room.drafted}",
            hint="start the loop with the largest policy that it will need",
        )


class RehearsalSource:
    """Children of two made-up requests; each sibling is half as likely as the one before."""

    def children(self, level: Level, frontier: Frontier, top_k: int) -> Children:
        shape = (*frontier.index.shape, top_k)
        best = torch.tensor(TYPICAL_PROBS, device=frontier.index.device)[:, None, None]
        halves = 0.5 ** torch.arange(top_k, device=best.device)
        token_ids = torch.arange(top_k, device=best.device).expand(shape)
        entropy = (1 / best[..., 0]).expand(shape[:2])
        return Children(token_ids, (best * halves).log().expand(shape), entropy, entropy)


@torch.inference_mode()
def rehearse(rules: Runnable) -> None:
    """Has the rules decide two made-up rounds."""
    shape, rows = rules.shape, len(TYPICAL_PROBS)
    if shape.max_depth == 0:
        return
    device = rules.drafter.device if rules.drafter is not None else torch.device("cpu")
    roots = torch.zeros(rows, dtype=torch.int64, device=device)
    try:
        plan = shape.begin(fresh_start(rows, shape.memory_size, device))
        recent = roots[:, None].expand(-1, RECENT_TOKENS) if shape.needs_text else None
        pool = grow_tree(shape, plan, RehearsalSource(), roots, Stopwatch(), recent)
        submitted = rules.budget.share(plan, pool, selected(shape, plan, pool))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _failed(f"{type(error).__name__}: {error}") from error
    if not is_closed(submitted, pool.parent, shape.max_tokens):
        raise _failed("nodes without their parents, or out of order")


def _failed(found: str) -> UsageError:
    return UsageError(
        f"the policy failed in a rehearsal of two made-up rounds: {found}",
        hint="fit it again; the old policy stays",
    )
