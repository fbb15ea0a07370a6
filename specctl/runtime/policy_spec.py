"""Policies by name: `ar`, `chain:num_draft_tokens=6`, `eagle2:depth=8+survival:max_tokens=64`, or
an artifact folder. docs/policies.md lists the words and their settings."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.artifacts.codec import load_artifact
from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import LossyPolicyError, UsageError
from specctl.policy import Policy
from specctl.policy.build import StepCosts, check_costs, with_costs
from specctl.policy.parse import canonical_json, parse_policy
from specctl.policy.records import StepCost

NAMED_SHAPES = ("ar", "chain", "eagle2")
"""Static shapes."""
ADAPTIVE_SHAPES: dict[str, dict[str, Any]] = {
    "stop": {"kind": "stop"},
    "confidence": {"kind": "stop", "signal": "confidence", "threshold": 0.4},
    "svip": {"kind": "stop", "signal": "sqrt_entropy", "threshold": 0.3, "keep_last": False},
    "adaedl": {"kind": "stop", "signal": "entropy_bound"},
    "ddd": {"kind": "ddd"},
    "opt_tree": {"kind": "opt_tree"},
    "threshold": {"kind": "threshold"},
}
"""Shapes that decide as they draft, with the settings that their sources give them."""
NAMED_BUDGETS = ("survival", "marginal")


@dataclass(frozen=True)
class NamedPolicy:
    """A policy, what to call it in tables, and the artifact it came from, if any."""

    label: str
    policy: Policy
    artifact_digest: str | None = None


def resolve_policy(
    spec: str,
    pair: PairFingerprint | None = None,
    *,
    allow_lossy: bool = False,
    step_cost: StepCost | StepCosts | None = None,
) -> NamedPolicy:
    """The policy that a user named.

    Args:
        spec: an artifact folder, or a shape's name with `:field=value` settings, then maybe `+`
            and a budget's name with its own.
        pair: the pair it must fit; None skips the check (inspection only).
        allow_lossy: accept policies that change the target's law.
        step_cost: given to a budget that needs one and brings none.

    Raises:
        UsageError: unknown name or field, or a budget without the step costs that it needs.
        ArtifactError: a folder that must not be loaded.
        LossyPolicyError: a lossy policy without `allow_lossy`.
    """
    if os.path.isdir(spec):  # false, where Path.is_dir raises, for a text too long for a path
        artifact = load_artifact(Path(spec), expect=pair)
        named = NamedPolicy(artifact.policy.name, artifact.policy, artifact.digest)
    else:
        named = NamedPolicy(spec, _from_words(spec))
    if step_cost is not None:
        named = replace(named, policy=with_costs(named.policy, step_cost))
    if not named.policy.lossless and not allow_lossy:
        raise LossyPolicyError(
            f"policy {named.label}",
            expected="a lossless acceptance",
            found=named.policy.acceptance.kind,
            fix="pass --allow-lossy if changed text is acceptable",
        )
    check_costs(named.policy.budget)
    return named


def resolve_policies(
    specs: str,
    pair: PairFingerprint | None = None,
    *,
    allow_lossy: bool = False,
    step_cost: StepCost | StepCosts | None = None,
) -> list[NamedPolicy]:
    """Several comma-separated policies; two of one label are told apart by their spec.

    Raises:
        UsageError: the same policy twice, or an empty name; see also `resolve_policy`.
    """
    words = [word.strip() for word in specs.split(",")]
    named = [
        resolve_policy(word, pair, allow_lossy=allow_lossy, step_cost=step_cost) for word in words
    ]
    labels = [item.label for item in named]
    named = [
        replace(item, label=f"{item.label}:{word}") if labels.count(item.label) > 1 else item
        for item, word in zip(named, words, strict=True)
    ]
    if len({item.label for item in named}) < len(named):
        raise UsageError(
            "policies", expected="each of them once", found=specs, fix="remove the repeated one"
        )
    return named


def _from_words(spec: str) -> Policy:
    shape, *budgets = spec.split("+")
    record: dict[str, Any] = {"shape": _fields(spec, shape, _shape_defaults(spec, shape))}
    if len(budgets) > 1:
        raise UsageError(
            f"policy {spec!r}",
            expected="one budget at most",
            found=f"{len(budgets)}: {', '.join(budgets)}",
            fix="remove all but one",
        )
    if budgets:
        record["budget"] = _fields(spec, budgets[0], _budget_kind(budgets[0]))
    try:
        return parse_policy(canonical_json(record))
    except UsageError as error:
        raise UsageError(
            f"policy {spec!r}",
            expected="settings field=value as docs/policies.md lists them",
            found=error.found,
            fix="correct that setting",
        ) from error


def _shape_defaults(spec: str, words: str) -> dict[str, Any]:
    name = words.partition(":")[0]
    if name in NAMED_SHAPES:
        return {"kind": name}
    if name not in ADAPTIVE_SHAPES:
        raise UsageError(
            "policy",
            expected=f"{', '.join((*NAMED_SHAPES, *ADAPTIVE_SHAPES))} or the folder of an artifact",
            found=repr(spec),
            fix="check the name or the path",
        )
    return ADAPTIVE_SHAPES[name]


def _budget_kind(words: str) -> dict[str, Any]:
    name = words.partition(":")[0]
    if name not in NAMED_BUDGETS:
        raise UsageError(
            "budget behind '+'",
            expected=" or ".join(NAMED_BUDGETS),
            found=repr(words),
            fix="check the name",
        )
    return {"kind": name}


def _fields(spec: str, words: str, defaults: dict[str, Any]) -> dict[str, Any]:
    settings = [_setting(spec, word) for word in words.split(":")[1:]]
    names = ["kind", *(name for name, _ in settings)]  # the name before the colon is the kind
    if len(set(names)) < len(names):
        raise UsageError(
            f"policy {spec!r}",
            expected="each setting once, and no kind",
            found=", ".join(names[1:]),
            fix="remove what is repeated",
        )
    return {**defaults, **dict(settings)}


def _setting(spec: str, word: str) -> tuple[str, Any]:
    field, _, value = word.partition("=")
    if not field or not value:
        raise UsageError(
            f"policy {spec!r}",
            expected="settings such as eagle2:depth=6:top_k=8:num_tokens=48",
            found=repr(word),
            fix="give field=value, separated by colons",
        )
    return field, [_value(part) for part in value.split("/")] if "/" in value else _value(value)


def _value(text: str) -> Any:
    """A number, `true` or `false`; other text stands for itself, for the record to judge."""
    for read in (int, _finite):
        with suppress(ValueError):
            return read(text)
    return {"true": True, "false": False}.get(text, text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
