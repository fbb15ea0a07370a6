"""The parameters of every policy family, validated; plain values that serialise to JSON.

The fields named in a record's `learned` were fitted: the codec moves them into
`policy.safetensors` and leaves a reference in the manifest. Everything else is a hyperparameter.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from specctl.policy.acceptances import Acceptance, JensenShannon, Mars, Strict
from specctl.policy.adaptive import (
    DynamicDepth,
    EntropyStop,
    JointThreshold,
    OptTree,
    SignalStop,
)
from specctl.policy.base import (
    MAX_DEPTH,
    MAX_TOKENS,
    PositiveInt,
    Record,
    ceil_float32,
    floor_float32,
    require,
)
from specctl.policy.budgets import (
    Budget,
    Calibration,
    ElasticBudget,
    MarginalBudget,
    PerRequest,
    SurvivalBudget,
)
from specctl.policy.costs import StepCost
from specctl.policy.scorers import FfnScorer, Scorer, TreesScorer
from specctl.policy.shapes import (
    Chain,
    EntropyBins,
    FullTree,
    RootOnly,
    ScoredTree,
    Shape,
    SparseGates,
    StaticTree,
)

__all__ = [
    "MAX_DEPTH",
    "MAX_TOKENS",
    "Acceptance",
    "Budget",
    "Calibration",
    "Chain",
    "DynamicDepth",
    "ElasticBudget",
    "EntropyBins",
    "EntropyStop",
    "FfnScorer",
    "FullTree",
    "JensenShannon",
    "JointThreshold",
    "MarginalBudget",
    "Mars",
    "OptTree",
    "PerRequest",
    "Policy",
    "PositiveInt",
    "Record",
    "RootOnly",
    "ScoredTree",
    "Scorer",
    "Shape",
    "SignalStop",
    "SparseGates",
    "StaticTree",
    "StepCost",
    "Strict",
    "SurvivalBudget",
    "TreesScorer",
    "ceil_float32",
    "floor_float32",
]


class Policy(Record):
    """A shape, a budget and an acceptance; any of them may be the default."""

    shape: Shape
    budget: Budget = PerRequest()
    acceptance: Acceptance = Strict()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        """Refuses parts of which one could never act: it would be reported and do nothing."""
        plain = isinstance(self.shape, RootOnly)
        shares = not isinstance(self.budget, PerRequest)
        require(not (plain and shares), "ar drafts nothing that a budget could share")
        require(not plain or self.lossless, "ar drafts nothing that could be accepted or refused")
        return self

    @property
    def lossless(self) -> bool:
        """Whether the emitted text follows the target's own law, whatever the shape."""
        return isinstance(self.acceptance, Strict)

    @property
    def name(self) -> str:
        """Kinds of the parts that are not the default, e.g. `hetero` or `echo+echo_budget`."""
        parts: list[Any] = [self.shape, self.budget, self.acceptance]
        kinds = [part.kind for part in parts if not isinstance(part, PerRequest | Strict)]
        return "+".join(kinds)
