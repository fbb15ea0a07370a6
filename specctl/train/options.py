"""From the words of a command line to a validated fit configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from specctl.errors import TraceMismatchError, UsageError
from specctl.policy.parse import canonical_json, describe_violation
from specctl.policy.records import Record
from specctl.train.c2t_config import C2TConfig
from specctl.train.gbdt_config import RICH_FEATURES, GbdtConfig
from specctl.train.nodes import DEFAULT_FEATURES, Support
from specctl.train.rounds import CartConfig

Config = TypeVar("Config", bound=Record)
DEFAULT_SIZES = {"depth": 11, "first_top_k": 10, "second_top_k": 10}
"""Of a node scorer's trees, where the traces hold as much (the paper's)."""


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
    return validated(CartConfig, "fit cart", fields)


def validated(record: type[Config], verb: str, fields: Mapping[str, Any]) -> Config:
    """A record of options, strictly.

    Raises:
        UsageError: an option out of range, named.
    """
    try:
        return record.model_validate_json(canonical_json(dict(fields)))
    except ValidationError as error:
        raise UsageError(
            verb,
            expected="options within their ranges (see --help)",
            found=describe_violation(error),
            fix="correct that option",
        ) from error


def c2t_config(support: Support, *, nodes: dict[str, Any], **options: Any) -> C2TConfig:
    """The configuration of `fit c2t`.

    Args:
        support: what the traces hold; sizes that are None become theirs, or the default's where
            they hold more.
        nodes: fields of `NodeConfig`; `features` comma-separated, or None for the label's own.
        options: other fields of `C2TConfig`.

    Raises:
        UsageError: an option out of range, named.
    """
    return validated(C2TConfig, "fit c2t", {**options, "nodes": node_fields(support, **nodes)})


def gbdt_config(
    support: Support,
    *,
    nodes: dict[str, Any],
    trees: dict[str, Any],
    ffn: dict[str, Any],
    seed: int,
    **options: Any,
) -> GbdtConfig:
    """The configuration of `fit gbdt`; as `c2t_config`, but for what trees do better with.

    Args:
        trees: fields of `TreesConfig`. ffn: fields of `FfnConfig`. seed: of all of them.
    """
    if nodes["features"] is None:
        nodes = {**nodes, "features": ",".join(RICH_FEATURES)}
    if nodes["negatives"] is None and nodes["predicts"] == "conditional":
        nodes = {**nodes, "negatives": 0.0}  # children of accepted nodes only: few enough
    fields = {
        **options,
        "seed": seed,
        "nodes": {**node_fields(support, **nodes), "seed": seed},
        "trees": {**trees, "seed": seed},
        "ffn": {**ffn, "seed": seed},
    }
    return validated(GbdtConfig, "fit gbdt", fields)


def node_fields(
    support: Support, *, features: str | None, predicts: str, **fields: Any
) -> dict[str, Any]:
    """Fields of `NodeConfig`, defaults filled in; see `c2t_config`."""
    held = {"depth": support.depth, "first_top_k": support.top_k, "second_top_k": support.width}
    sizes = {name: min(most, held[name]) for name, most in DEFAULT_SIZES.items()}
    given = {name: value for name, value in fields.items() if value is not None}
    own = DEFAULT_FEATURES.get(predicts, DEFAULT_FEATURES["conditional"])
    names = own if features is None else features.split(",")
    return {**sizes, **given, "features": list(names), "predicts": predicts}


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
