"""Policies by name: `ar`, `chain:num_draft_tokens=6`, `eagle2:depth=8+survival:max_tokens=64`, an
artifact folder, a reference such as `s3://bucket/registry/NAME@prod`, or several composed: a shape,
then `+` what replaces its budget or acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from os.path import isdir
from typing import Any

from specctl.artifacts.compatibility import Expected, check_expected
from specctl.artifacts.load import Artifact
from specctl.errors import LossyPolicyError, UsageError, refusals_of
from specctl.policy import (
    PerRequest,
    Policy,
    StepCost,
    StepCosts,
    Strict,
    check_costs,
    parse_policy,
    with_costs,
)
from specctl.records import canonical_json
from specctl.runtime.policy_places import artifact_at
from specctl.runtime.policy_words import PARTS, SHAPES, names_artifact, part_of, pieces, record_of

Load = Callable[[str], Artifact]


@dataclass(frozen=True)
class NamedPolicy:
    """A policy, what to call it in tables, and the artifact it came from, if it is one whole.

    Attributes:
        parts: artifacts by the part that they gave (`shape`, `budget`, `acceptance`).
        spec: the user's words for it.
    """

    label: str
    policy: Policy
    artifact_digest: str | None = None
    parts: tuple[tuple[str, Artifact], ...] = ()
    spec: str = ""


def resolve_policy(
    spec: str,
    pair: Expected | None = None,
    *,
    allow_lossy: bool = False,
    step_cost: StepCost | StepCosts | None = None,
    offline: bool = False,
) -> NamedPolicy:
    """The policy that a user named.

    Args:
        spec: an artifact folder, `REGISTRY/NAME@ALIAS` (without `REGISTRY/`, of the registry in
            `SPECCTL_REGISTRY`), or a shape's name with `:field=value`
            settings; then `+` and words of a budget or an acceptance, or an artifact that brings
            one, which replace those of the first.
        pair: the pair, or all that an `Expectation` says, that it must fit; None skips the check
            (inspection only).
        allow_lossy: accept policies that change the target's law.
        step_cost: given to a budget that needs one and brings none.
        offline: registries are not asked; the cache is, and that is said in the log.

    Raises:
        UsageError: unknown name or field, parts that do not go together, or a budget without
            the step costs that it needs.
        ArtifactError: an artifact that must not be loaded.
        RegistryError, StoreError: a registry that says no, or cannot be asked.
        LossyPolicyError: a lossy policy without `allow_lossy`.
    """
    named = _composed(spec, partial(artifact_at, expect=pair, offline=offline))
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
    pair: Expected | None = None,
    *,
    allow_lossy: bool = False,
    step_cost: StepCost | StepCosts | None = None,
    offline: bool = False,
) -> list[NamedPolicy]:
    """Several comma-separated policies; two of one label are told apart by their spec.

    Raises:
        UsageError: the same policy twice, or an empty name; see also `resolve_policy`.
    """
    words = [word.strip() for word in specs.split(",")]
    named = [
        resolve_policy(word, pair, allow_lossy=allow_lossy, step_cost=step_cost, offline=offline)
        for word in words
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


def check_policies(named: Iterable[NamedPolicy], expect: Expected) -> None:
    """Refuses policies of another pair or domain, which were resolved before that was known.

    Raises:
        ArtifactError: as `resolve_policy` with a pair.
    """
    artifacts = {one.digest: (policy.spec, one) for policy in named for _, one in policy.parts}
    for spec, artifact in artifacts.values():
        with refusals_of(spec):
            check_expected(artifact.manifest, expect)


@dataclass(frozen=True)
class _Given:
    """One part of a composition, where it comes from, and whether an artifact gave it."""

    part: str
    record: Any
    artifact: Artifact | None = None


def _composed(spec: str, load: Load) -> NamedPolicy:
    first, *rest = pieces(spec)
    base = _first(spec, first, load)
    added = [given for piece in rest for given in _added(spec, piece, load)]
    _check_once(spec, [given.part for given in added])
    given = {item.part: item for item in [*base, *added]}
    policy = _policy(spec, {part: item.record for part, item in given.items()})
    parts = tuple((part, item.artifact) for part, item in given.items() if item.artifact)
    if rest or not parts:
        label = "+".join([_label(first, base), *rest]) if rest else spec
        return NamedPolicy(label, policy, None, parts, spec)
    return NamedPolicy(policy.name, policy, parts[0][1].digest, parts, spec)


def _label(piece: str, given: list[_Given]) -> str:
    artifact = given[0].artifact
    return piece if artifact is None else artifact.policy.name


def _first(spec: str, piece: str, load: Load) -> list[_Given]:
    """What the first piece gives: a shape, and all else of an artifact."""
    if names_artifact(piece):
        return _parts_of(load(piece), with_shape=True)
    if part_of(piece) != "shape":
        raise UsageError(
            "policy",
            expected=f"{', '.join(SHAPES)} or an artifact",
            found=repr(spec),
            fix="check the name or the path; a registry's is REGISTRY/NAME@ALIAS",
        )
    return [_Given("shape", record_of(piece))]


def _added(spec: str, piece: str, load: Load) -> list[_Given]:
    """What a piece behind a plus gives: a budget, an acceptance, or both of an artifact."""
    if names_artifact(piece):
        found = _parts_of(load(piece), with_shape=False)
        if found:
            return found
        raise UsageError(
            f"policy {spec!r}",
            expected="an artifact with a budget or an acceptance of its own behind '+'",
            found=f"{piece}, which has neither",
            fix="put the artifact that gives the shape first",
        )
    part = part_of(piece)
    if part in (None, "shape"):
        others = [word for kind, words in PARTS.items() if kind != "shape" for word in words]
        raise UsageError(
            f"policy {spec!r}, behind '+'",
            expected=f"{', '.join(others)} or an artifact",
            found="another shape, " + repr(piece) if part else repr(piece),
            fix="give one shape, and it first" if part else "check the name or the path",
        )
    assert part is not None
    return [_Given(part, record_of(piece))]


def _parts_of(artifact: Artifact, *, with_shape: bool) -> list[_Given]:
    """The parts that an artifact decides: those that are not the default."""
    policy = artifact.policy
    chosen = [("budget", policy.budget), ("acceptance", policy.acceptance)]
    found = [(n, r) for n, r in chosen if not isinstance(r, PerRequest | Strict)]
    shape = [("shape", policy.shape)] if with_shape else []
    return [_Given(n, r.model_dump(mode="json"), artifact) for n, r in [*shape, *found]]


def _check_once(spec: str, parts: Iterable[str]) -> None:
    given = list(parts)
    for part in set(given):
        if given.count(part) > 1:
            raise UsageError(
                f"policy {spec!r}",
                expected=f"one {part} at most behind the shape",
                found=f"{given.count(part)}",
                fix="remove all but one",
            )


def _policy(spec: str, records: dict[str, Any]) -> Policy:
    try:
        return parse_policy(canonical_json(records))
    except UsageError as error:
        raise UsageError(
            f"policy {spec!r}",
            expected="parts that go together, settings field=value as docs/policies.md lists them",
            found=error.found,
            fix=f"write ./{spec} for the folder of that name" if isdir(spec) else "correct that",
        ) from error
