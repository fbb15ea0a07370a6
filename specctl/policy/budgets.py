"""Budgets: how a batch shares verification."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specctl.policy.base import PositiveInt, Record, TopK


class PerRequest(Record):
    """Each request submits what its shape chose."""

    kind: Literal["per_request"] = "per_request"


class ElasticBudget(Record):
    """ECHO's batch budget (Algorithm 1, repaired: never negative, fair order, root counted).

    Attributes:
        max_tokens: K_max, nodes verified per round over the batch, roots counted.
        default_width: W_dflt, nodes a level costs.
    """

    kind: Literal["echo_budget"] = "echo_budget"
    max_tokens: PositiveInt
    default_width: TopK = 3


class SurvivalBudget(Record):
    """Global top slots by joint acceptance probability, the rule vLLM and DSpark ship.

    Attributes:
        max_tokens: nodes verified per round over the batch, roots counted; where absent, the
            size is chosen by expected tokens over profiled step cost.
    """

    kind: Literal["survival"] = "survival"
    max_tokens: PositiveInt | None = None


class MarginalBudget(Record):
    """Verify a node iff its joint acceptance is at least rate · marginal cost (section 2.2)."""

    kind: Literal["marginal"] = "marginal"
    tokens_per_s: Annotated[float, Field(gt=0)]


Budget = Annotated[
    PerRequest | ElasticBudget | SurvivalBudget | MarginalBudget, Field(discriminator="kind")
]
