"""From the words of a command line to a validated fit configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from specctl.errors import TraceMismatchError, UsageError
from specctl.policy.parse import canonical_json, describe_violation
from specctl.train.rounds import CartConfig


def cart_config(collected_with: Mapping[str, Any], *, gammas: str, **options: Any) -> CartConfig:
    """The configuration of `fit cart`.

    Args:
        collected_with: the policy record in the traces' header; its tree is the base that the
            fitted policy extends.
        gammas: comma-separated size factors.
        options: other fields of `CartConfig`.

    Raises:
        TraceMismatchError: traces of another shape than an EAGLE-2 tree.
        UsageError: an option out of range, named.
    """
    shape = collected_with["shape"]
    if shape["kind"] != "eagle2":
        raise TraceMismatchError(
            "fit cart",
            expected="traces collected with a static tree (--policy eagle2)",
            found=f"policy {shape['kind']}",
            fix="collect again with eagle2",
        )
    fields = {**options, "base": shape, "gammas": _numbers(gammas)}
    try:
        return CartConfig.model_validate_json(canonical_json(fields))
    except ValidationError as error:
        raise UsageError(
            "fit cart",
            expected="options within their ranges (see --help)",
            found=describe_violation(error),
            fix="correct that option",
        ) from error


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise UsageError(
            "--gammas",
            expected="comma-separated numbers such as 0.3,0.6,1.0",
            found=repr(text),
            fix="correct it",
        ) from error
