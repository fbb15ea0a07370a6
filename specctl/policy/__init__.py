"""Policies: three independent parts, each a frozen record of parameters, that compose.

- **shape**: how a draft tree grows and which of its nodes are submitted to the target;
- **budget**: how a batch shares verification;
- **acceptance**: what the target's logits admit.

`records` states and validates the parameters of every family, `rules` is the contract of the
code that decides (tensors in, tensors out, batch first), `build` turns a record into its rule.
Fit, replay and runtime all decide through the rule: there is no second implementation.
"""

from typing import TYPE_CHECKING

from specctl.lazy import lazy_exports

if TYPE_CHECKING:
    from specctl.policy.build import build_acceptance, build_budget, build_shape
    from specctl.policy.parse import parse_policy, policy_digest, policy_json
    from specctl.policy.records import (
        Chain,
        EntropyBins,
        FullTree,
        Policy,
        RootOnly,
        StaticTree,
        Strict,
    )
    from specctl.policy.rules import BudgetRule, Frontier, Plan, RoundStart, ShapeRule
    from specctl.policy.verification import AcceptanceRule, Judgement, Outcome, Verification

__all__ = [
    "AcceptanceRule",
    "BudgetRule",
    "Chain",
    "EntropyBins",
    "Frontier",
    "FullTree",
    "Judgement",
    "Outcome",
    "Plan",
    "Policy",
    "RootOnly",
    "RoundStart",
    "ShapeRule",
    "StaticTree",
    "Strict",
    "Verification",
    "build_acceptance",
    "build_budget",
    "build_shape",
    "parse_policy",
    "policy_digest",
    "policy_json",
]
__getattr__ = lazy_exports(
    __name__,
    {
        "AcceptanceRule": "verification",
        "BudgetRule": "rules",
        "Chain": "records",
        "EntropyBins": "records",
        "Frontier": "rules",
        "FullTree": "records",
        "Judgement": "verification",
        "Outcome": "verification",
        "Plan": "rules",
        "Policy": "records",
        "RootOnly": "records",
        "RoundStart": "rules",
        "ShapeRule": "rules",
        "StaticTree": "records",
        "Strict": "records",
        "Verification": "verification",
        "build_acceptance": "build",
        "build_budget": "build",
        "build_shape": "build",
        "parse_policy": "parse",
        "policy_digest": "parse",
        "policy_json": "parse",
    },
)
