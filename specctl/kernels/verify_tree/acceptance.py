"""What `walk_tree` may follow besides the child that holds the target's own token.

All of it is tensors, thresholds too, so that a captured graph sees a value that is overwritten in
place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kernels.checks import require_tensor

LOGITS = (torch.float32, torch.bfloat16, torch.float16)


class Walk(NamedTuple):
    """What a walk found in B trees of up to D levels.

    Attributes:
        path: `[B, D + 1]` int64, root and accepted nodes, -1 padded.
        token_ids: `[B, D + 1]` int64, what is emitted: accepted tokens, then the target's own
            after the last of them; -1 padded.
        bonus_ids: `[B]` int64, the last of them.
        num_accepted: `[B]` int64, draft tokens among them.
        first_rejected: `[B]` int64, the first child of the path's end, -1 for none.
    """

    path: Tensor
    token_ids: Tensor
    bonus_ids: Tensor
    num_accepted: Tensor
    first_rejected: Tensor


@dataclass(frozen=True)
class Judged:
    """What a rule decided beforehand: `follow(n)` is the child with `admitted`, if there is one.

    Attributes:
        admitted: `[B, N]` bool, at most one child per node.
    """

    admitted: Tensor

    def check(self, num_rows: int, num_slots: int) -> None:
        """Refuses what does not fit a batch of trees."""
        require_tensor("walk_tree", "admitted", self.admitted, (num_rows, num_slots), torch.bool)


@dataclass(frozen=True)
class RunnerUp:
    """The target's second choice, where it is near the first (MARS, arXiv:2601.15498, Algorithm 1;
    `specctl.policy.mars`, modes `sound` and `alg1`).

    With v1, v2 and z1 >= z2 the ids and logits of `top`, in a greedy row v1 being y and v2 the
    other of them if y is one (of logits that tie, two kernels may order others):

        def follow(n):
            if some child holds y: return it
            if some child holds v1: return None
            if denied[y] or denied[v2] or law[n, v2] == -inf: return None
            closeness = z2 / z1 if z1 > 0 and z2 > 0 else -inf      # form "ratio"
            closeness = z2 - z1                                     # form "difference"
            if closeness > bound: return the child that holds v2, if there is one

    `difference` serves two of the record's forms: a margin below theta is a bound of -theta, a
    probability ratio above theta one of log(theta). Ratio and difference are those of IEEE
    float32; closeness that is NaN is not near.

    Attributes:
        top_ids: `[B, N, 2]` int64. top_logits: `[B, N, 2]` float32, raw.
        greedy: `[B]` bool.
        bound: `[B]` float32, what closeness must exceed.
        denied: `[V]` bool, tokens that are relaxed neither to nor from; None denies none.
        law: `[B, N, V]` logits after top-k and top-p, whose -inf are never emitted; None where
            nothing is excluded.
    """

    top_ids: Tensor
    top_logits: Tensor
    greedy: Tensor
    bound: Tensor
    form: Literal["ratio", "difference"] = "ratio"
    denied: Tensor | None = None
    law: Tensor | None = None

    def check(self, num_rows: int, num_slots: int) -> None:
        """Refuses what does not fit a batch of trees."""
        pairs = (num_rows, num_slots, 2)
        require_tensor("walk_tree", "top_ids", self.top_ids, pairs, torch.int64)
        require_tensor("walk_tree", "top_logits", self.top_logits, pairs, torch.float32)
        require_tensor("walk_tree", "greedy", self.greedy, (num_rows,), torch.bool)
        require_tensor("walk_tree", "bound", self.bound, (num_rows,), torch.float32)
        _check_denied(self.denied)
        if self.law is not None:
            require_tensor("walk_tree", "law", self.law, (num_rows, num_slots, None), *LOGITS)
        if self.form not in ("ratio", "difference"):
            raise UsageError(
                "kernel walk_tree, form",
                expected="ratio or difference",
                found=repr(self.form),
                fix="name one of them",
            )


@dataclass(frozen=True)
class NearLaw:
    """The likeliest child, where drafter and target are near each other (AdaSD, arXiv:2512.11280,
    section 4.4; `specctl.policy.adasd`).

        def follow(n):
            if some child holds y: return it
            c = children(n)[0]                          # slots ascend with the sibling's rank
            if denied[y] or denied[token_ids[c]]: return None
            if distance[c] < threshold: return c        # in float64; NaN is not near

    Attributes:
        distance: `[B, N]` float32, of the two laws at the node's parent, e.g. by `js_distance`.
        threshold: `[B]` float64.
        denied: as in `RunnerUp`.
    """

    distance: Tensor
    threshold: Tensor
    denied: Tensor | None = None

    def check(self, num_rows: int, num_slots: int) -> None:
        """Refuses what does not fit a batch of trees."""
        shape = (num_rows, num_slots)
        require_tensor("walk_tree", "distance", self.distance, shape, torch.float32)
        require_tensor("walk_tree", "threshold", self.threshold, (num_rows,), torch.float64)
        _check_denied(self.denied)


Acceptance = Judged | RunnerUp | NearLaw


def tensors_of(acceptance: Acceptance | None) -> list[Tensor]:
    """What must live on the tree's device."""
    if acceptance is None:
        return []
    values = (getattr(acceptance, field.name) for field in fields(acceptance))
    return [value for value in values if isinstance(value, Tensor)]


def _check_denied(denied: Tensor | None) -> None:
    if denied is not None:
        require_tensor("walk_tree", "denied", denied, (None,), torch.bool)
