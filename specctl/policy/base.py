"""What all policy records share: strictness, bounds, float32 rounding."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
MAX_DEPTH, MAX_TOP_K, MAX_TOKENS = 64, 64, 1024
"""Bounds that keep a hostile or mistyped record from asking for absurd memory."""
Depth = Annotated[int, Field(ge=1, le=MAX_DEPTH)]
TopK = Annotated[int, Field(ge=1, le=MAX_TOP_K)]
NumTokens = Annotated[int, Field(ge=2, le=MAX_TOKENS)]


def require(holds: bool, law: str) -> None:  # noqa: FBT001
    if not holds:
        raise ValueError(law)


def floor_float32(value: float) -> float:
    """The largest float32 not above `value`.

    Thresholds are compared in float32 at run time; rounding to nearest could move one past a
    data point (notes/dependencies.md, section 3), rounding down keeps every `x <= t` decision.
    """
    require(abs(value) <= MAX_FLOAT32, f"magnitude exceeds float32, {MAX_FLOAT32:.3g}")
    nearest = np.float32(value)
    if float(nearest) <= value:  # as Python floats: numpy would round `value` to float32 first
        return float(nearest)
    return float(np.nextafter(nearest, np.float32(-np.inf)))


def ceil_float32(value: float) -> float:
    """The smallest float32 not below `value`: keeps every `x < t` decision in float32."""
    return -floor_float32(-value)


MAX_FLOAT32 = float(np.finfo(np.float32).max)
Float32 = Annotated[float, AfterValidator(floor_float32)]
Array = tuple[Float32, ...]
Matrix = tuple[Array, ...]


class Record(BaseModel):
    """Frozen, strict, no unknown fields, no NaN: nothing is guessed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    learned: ClassVar[tuple[str, ...]] = ()
    """Fields that the codec keeps in safetensors rather than in the manifest."""


def increasing(values: Array) -> bool:
    return all(low < high for low, high in pairwise(values))
