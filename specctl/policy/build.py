"""From a record to the rule that decides."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.policy.hetero import entropy_bins_shape
from specctl.policy.records import (
    Acceptance,
    Chain,
    EntropyBins,
    PerRequest,
    Policy,
    RootOnly,
    Shape,
    StaticTree,
    Strict,
)
from specctl.policy.rules import AcceptanceRule, ShapeRule
from specctl.policy.static import static_shape
from specctl.tree import TokenTree, gather


class StrictAcceptance:
    """Point-mass verification: a node is admitted when it is the target's own token."""

    lossless = True

    def admit(self, tree: TokenTree, target_ids: Tensor) -> Tensor:
        wanted = gather(target_ids, tree.parent, -1)
        return (tree.token_ids == wanted) & (tree.parent >= 0)


def build_shape(shape: Shape, device: torch.device | str = "cpu") -> ShapeRule:
    """The rule that decides for a shape record, its tables on `device`."""
    if isinstance(shape, RootOnly | Chain | StaticTree):
        return static_shape(shape, torch.device(device))
    if isinstance(shape, EntropyBins):
        return entropy_bins_shape(shape, torch.device(device))
    raise _cannot_decide("shape", shape.kind, "ar, chain, eagle2 or hetero")


def build_acceptance(acceptance: Acceptance) -> AcceptanceRule:
    """The rule that decides for an acceptance record."""
    if isinstance(acceptance, Strict):
        return StrictAcceptance()
    raise _cannot_decide("acceptance", acceptance.kind, "strict")


def check_budget(policy: Policy) -> None:
    """Refuses a budget that no rule serves yet, rather than ignoring it."""
    if not isinstance(policy.budget, PerRequest):
        raise _cannot_decide("budget", policy.budget.kind, "per_request")


def _cannot_decide(part: str, kind: str, known: str) -> UsageError:
    return UsageError(
        f"policy {part}",
        expected=f"one that this version can run ({known})",
        found=repr(kind),
        fix="use one of those, or a newer specctl",
    )
