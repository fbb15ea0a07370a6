"""From the words of a command line to the configurations of `fit adasd`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import ValidationError

from specctl.errors import UsageError
from specctl.policy.parse import canonical_json, describe_violation
from specctl.policy.records import Record
from specctl.train.adasd import AdasdConfig
from specctl.train.adasd_clip import CLIPS, ClipConfig
from specctl.train.mars_options import loss_kind

ConfigT = TypeVar("ConfigT", bound=Record)


def stop_config(
    logged_depth: int, *, window: int | None, between: str, weights: str, **fields: Any
) -> AdasdConfig:
    """The configuration of the stop.

    Args:
        logged_depth: levels that the traces hold.
        between: `midpoint`, `rejected` or `both`. weights: comma-separated.
        fields: others of `AdasdConfig`.

    Raises:
        UsageError: an option out of range, or a window that the traces cannot tell.
    """
    if window is not None and window > logged_depth:
        raise UsageError(
            "--window",
            expected=f"at most {logged_depth}, the levels that the traces hold",
            found=str(window),
            fix="lower it, or collect deeper trees (collect --dense --depth)",
        )
    given = {
        "window": window or min(20, logged_depth),
        "between": ["midpoint", "rejected"] if between == "both" else [between],
        "weights": numbers(weights, "--weights"),
        **fields,
    }
    return checked(AdasdConfig, given)


def clip_config(
    *,
    clips: str | None,
    deny: str | None,
    special_ids: Collection[int],
    max_loss: float,
    confidence: float,
    loss: str,
    num_seeds: int,
    **fields: Any,
) -> ClipConfig:
    """The configuration of the acceptance.

    Args:
        clips, deny: comma-separated. special_ids: of the tokenizer, always denied.
        fields: others of `ClipConfig`.

    Raises:
        UsageError: an option out of range.
    """
    denied = {int(number) for number in numbers(deny, "--deny")} if deny else set()
    given = {
        "clips": numbers(clips, "--clips") if clips else CLIPS,
        "deny_token_ids": sorted({*denied, *special_ids}),
        "contract": {
            "max_loss": max_loss,
            "confidence": confidence,
            "kind": loss_kind(loss, num_seeds),
        },
        **fields,
    }
    return checked(ClipConfig, given)


def checked(kind: type[ConfigT], fields: dict[str, Any]) -> ConfigT:
    """A configuration, or the first violation as a refusal."""
    try:
        return kind.model_validate_json(canonical_json(fields))
    except (ValidationError, ValueError) as error:
        found = describe_violation(error) if isinstance(error, ValidationError) else str(error)
        raise UsageError(
            "fit adasd",
            expected="options within their ranges (see --help)",
            found=found,
            fix="correct that option",
        ) from error


def numbers(text: str, option: str) -> list[float]:
    """Comma-separated numbers."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise UsageError(
            option, expected="comma-separated numbers", found=repr(text), fix="correct it"
        ) from error
