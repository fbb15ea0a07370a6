"""How ECHO's gates are fitted, and the words of a command line for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from specctl.errors import UsageError
from specctl.policy.base import Depth, NumTokens, PositiveInt, Probability, TopK
from specctl.policy.parse import canonical_json, describe_violation
from specctl.policy.records import Budget, ElasticBudget, PerRequest, Record, SparseGates
from specctl.stats import UNKNOWN
from specctl.train.echo_levels import Gate


class EchoConfig(Record):
    """How to fit ECHO's gates.

    Attributes:
        depth, width, max_width, num_tokens: of the tree, see `SparseGates`.
        delta: the area that makes a level a sweet spot.
        max_gates: gates at most.
        thresholds: by Youden's J, or by the least predicted time on the training prompts.
        max_tokens: K_max of a batch: adds the elastic budget to the policy.
        min_rows: accepted and rejected rows, each, that a level needs.
        held_out_frac: share of prompts kept for the report. seed: of the split and bootstrap.
    """

    depth: Depth = 8
    width: TopK = 3
    max_width: TopK = 10
    num_tokens: NumTokens = 48
    delta: Probability = 0.8
    max_gates: PositiveInt = 3
    thresholds: Literal["youden", "cost"] = "youden"
    max_tokens: PositiveInt | None = None
    min_rows: PositiveInt = 50
    held_out_frac: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    def shape(self, gates: Sequence[Gate]) -> SparseGates:
        """The shape with these gates."""
        return SparseGates(
            depth=self.depth,
            width=self.width,
            max_width=self.max_width,
            num_tokens=self.num_tokens,
            gate_levels=tuple(gate.level for gate in gates),
            thresholds=tuple(gate.threshold for gate in gates),
        )

    @property
    def open_shape(self) -> SparseGates:
        """The shape with one gate that never closes."""
        return self.shape([Gate(1, 0.0, UNKNOWN)])

    @model_validator(mode="after")
    def _describes_a_shape(self) -> Self:
        _ = self.open_shape
        return self

    @property
    def budget(self) -> Budget:
        """ECHO's where a K_max is given."""
        if self.max_tokens is None:
            return PerRequest()
        return ElasticBudget(
            max_tokens=self.max_tokens, default_width=self.width, max_width=self.max_width
        )


def echo_config(**options: Any) -> EchoConfig:
    """The configuration of `fit echo`.

    Raises:
        UsageError: an option out of range, named.
    """
    try:
        return EchoConfig.model_validate_json(canonical_json(options))
    except ValidationError as error:
        raise UsageError(
            "fit echo",
            expected="options within their ranges (see --help)",
            found=describe_violation(error),
            fix="correct that option",
        ) from error
