"""Fitted shapes in tuning: which settings of a record a grid may change, and changing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.errors import UsageError
from specctl.policy import Policy
from specctl.policy.parse import canonical_json, parse_policy
from specctl.policy.records import EntropyBins, Shape
from specctl.replay.tune.grids import FITTED, SHARED_FITTED, Grid
from specctl.runtime.policy_words import record_of

NONE = "none"
"""How a setting that is not set is written."""
Settings = dict[str, str]
_PLACES = {("hetero", "num_tokens"): ("base", "num_tokens")}
"""Where a setting stands in its record, if not at the top."""


def fitted_grid(shape: Shape, *, is_shared: bool = False) -> Grid:
    """The grid of a fitted shape; its own settings stand first, so that they are looked at
    whatever it holds. Empty for a shape that nothing is searched of.

    Args:
        is_shared: it stands under a budget, which trims anyway.
    """
    grid, own = FITTED.get(shape.kind, {}), own_settings(shape)
    if is_shared:
        coarse = SHARED_FITTED.get(shape.kind, {})
        grid = {field: coarse.get(field, ()) for field in grid}
    return {
        field: (own[field], *(value for value in values if value != own[field]))
        for field, values in grid.items()
    }


def own_settings(shape: Shape) -> Settings:
    """What a fitted record has where its grid would change it."""
    record = shape.model_dump(mode="json")
    own = {
        field: _written(_read(record, shape.kind, field)) for field in FITTED.get(shape.kind, {})
    }
    if isinstance(shape, EntropyBins) and shape.alpha is None:  # the record says: half the depth
        deepest = max((d - shape.base.depth for d in shape.plan_depths), default=0)
        own["alpha"] = str(deepest + shape.index_base)
    return own


def with_settings(policy: Policy, settings: Mapping[str, str], budget: str = "") -> Policy:
    """The policy with other settings of its shape, and another budget if words of one are given.

    Raises:
        UsageError: settings that contradict each other or the record.
    """
    record = policy.model_dump(mode="json")
    for field, text in settings.items():
        *path, last = _PLACES.get((policy.shape.kind, field), (field,))
        place = record["shape"]
        for name in path:
            place = place[name]
        place[last] = _value(place[last], text)
    if budget:
        record["budget"] = record_of(budget)
    return parse_policy(canonical_json(record))


def contradicts(policy: Policy, settings: Mapping[str, str]) -> bool:
    """Whether the settings are no policy: a gate below the deepest level, say."""
    try:
        with_settings(policy, settings)
    except UsageError:
        return True
    return False


def _read(record: Any, kind: str, field: str) -> Any:
    for name in _PLACES.get((kind, field), (field,)):
        record = record[name]
    return record


def _written(value: Any) -> str:
    if value is None:
        return NONE
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _value(before: Any, text: str) -> Any:
    """The value that a grid writes as text, of the type that the record had before."""
    if text == NONE:
        return None
    if isinstance(before, list):
        return [float(part) for part in text.split("/")]
    return float(text) if isinstance(before, float) else int(text)
