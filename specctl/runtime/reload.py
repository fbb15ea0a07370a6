"""Checks before a policy may replace another while requests are being decoded."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from specctl.errors import LossyPolicyError, UsageError
from specctl.features import RECENT_TOKENS
from specctl.policy import Policy
from specctl.policy.growing import grow_tree
from specctl.policy.rules import Frontier, Level, ShapeRule, fresh_start
from specctl.runtime.drafter import Drafter
from specctl.runtime.requests import Stopwatch
from specctl.runtime.runnable import Runnable, selected
from specctl.tree import Children

TYPICAL_PROBS = (0.6, 0.15)
"""Probability of the likeliest child in the two rows of a rehearsal."""


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


def is_closed(submitted: Tensor, parent: Tensor, max_tokens: int) -> bool:
    """Whether rows `[B, N]` of pool indices are trees: ascending, root first, parents present."""
    valid = submitted >= 0
    slots = torch.arange(parent.shape[1], device=parent.device)
    is_in = (submitted[:, :, None] == slots).any(1)
    above = parent.gather(1, submitted.clamp(min=1))
    has_parent = is_in.gather(1, above.clamp(min=0)) | ~valid | (submitted == 0)
    ascends = (submitted[:, 1:] > submitted[:, :-1]) | ~valid[:, 1:]
    sound = [submitted[:, 0] == 0, has_parent.all(1), ascends.all(1), valid.sum(1) <= max_tokens]
    return bool(torch.stack(sound).all())


def _failed(found: str) -> UsageError:
    return UsageError(
        f"the policy failed in a rehearsal of two made-up rounds: {found}",
        hint="fit it again; the old policy stays",
    )
