"""Parameters of a request's two running means; `running` has their arithmetic."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from specctl.policy.base import Record, require

Value = Annotated[float, Field(ge=0)]


class RunningMeans(Record):
    """How the means start and how they forget.

    Attributes:
        min_samples: accepted and rejected tokens to see before the rule acts; a warm start counts
            as `prior_weight` of each.
        prior_accepted, prior_rejected: warm start, each weighing `prior_weight` tokens.
        half_life: tokens of a class after which one of them weighs half. None never forgets, as
            in the paper.
    """

    min_samples: Annotated[int, Field(ge=0)] = 8
    prior_accepted: Value | None = None
    prior_rejected: Value | None = None
    prior_weight: Value = 0.0
    half_life: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        given = {self.prior_accepted is None, self.prior_rejected is None, not self.prior_weight}
        require(len(given) == 1, "a warm start is both priors and their weight, or none of them")
        return self
