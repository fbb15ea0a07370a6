"""Budgets: how a batch shares verification."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from specctl.policy.base import MAX_DEPTH, Array, PositiveInt, Record, TopK, require
from specctl.policy.costs import StepCost


class Calibration(Record):
    """Conditional acceptance as a logistic function of the draft probability, per depth.

    P(accepted | parent accepted) = sigmoid(slope · logit(draft_prob) + intercept), multiplied
    along the path, so that no child is likelier than its parent whatever was fitted
    (notes/state-of-the-art.md, 2.1 and 4c; temperatures per position are the slopes alone).

    Attributes:
        slopes, intercepts: entry i is for depth i + 1, the last one for all deeper levels;
            slopes have no unit, intercepts are log-odds in nats.
    """

    learned: ClassVar = ("slopes", "intercepts")
    slopes: Annotated[Array, Field(min_length=1, max_length=MAX_DEPTH)]
    intercepts: Array

    @model_validator(mode="after")
    def _paired(self) -> Self:
        require(len(self.slopes) == len(self.intercepts), "one intercept per slope")
        return self


class PerRequest(Record):
    """Each request submits what its shape chose."""

    kind: Literal["per_request"] = "per_request"


class ElasticBudget(Record):
    """ECHO's batch budget (Algorithm 1, repaired: never negative, fair order, root counted).

    Attributes:
        max_tokens: K_max, nodes verified per round over the batch, roots counted, hence at least
            the batch size.
        default_width: W_dflt, nodes that a request gets of a level when it deepens.
        max_width: W_max, nodes that a request gets at a time when it is widened.
        order: requests of a level by their confidence, or by row, as the paper's loop has it,
            which starves the late rows.
    """

    kind: Literal["echo_budget"] = "echo_budget"
    max_tokens: PositiveInt
    default_width: TopK = 3
    max_width: TopK = 10
    order: Literal["confidence", "row"] = "confidence"


class SurvivalBudget(Record):
    """Global top slots by joint acceptance probability, the rule vLLM and DSpark ship.

    Attributes:
        max_tokens: nodes verified per round over the batch, roots counted, hence at least the
            batch size; where absent, only the costs decide.
        costs: time of a round by its size; where given, the size of most expected tokens per
            time is taken, within `max_tokens`.
        calibration: from draft probability to acceptance; where absent, the draft probability
            is taken as it is.
    """

    kind: Literal["survival"] = "survival"
    max_tokens: PositiveInt | None = None
    costs: StepCost | None = None
    calibration: Calibration | None = None

    @property
    def lacks_costs(self) -> bool:
        """Whether the size cannot be decided for want of a cost table."""
        return self.max_tokens is None and self.costs is None


class MarginalBudget(Record):
    """Verify a node iff its joint acceptance is at least rate · marginal cost (section 2.2).

    Attributes:
        tokens_per_s: λ, the long-run rate of the whole batch at this load; the fixed point is
            where the rate that the rule achieves is the one it was given.
        costs: time of a round by its size.
        calibration: as for the survival budget.
    """

    kind: Literal["marginal"] = "marginal"
    tokens_per_s: Annotated[float, Field(gt=0)]
    costs: StepCost | None = None
    calibration: Calibration | None = None

    @property
    def lacks_costs(self) -> bool:
        """Whether the marginal cost is unknown for want of a cost table."""
        return self.costs is None


Budget = Annotated[
    PerRequest | ElasticBudget | SurvivalBudget | MarginalBudget, Field(discriminator="kind")
]
