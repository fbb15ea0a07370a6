"""From records to rules."""

from __future__ import annotations

from typing import get_args

from specctl.policy.build import _SHAPES
from specctl.policy.records import Shape


def test_every_shape_has_a_rule() -> None:
    union, _ = get_args(Shape)
    assert set(_SHAPES) == set(get_args(union))
