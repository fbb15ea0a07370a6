"""Policies by name: `ar`, `chain:6`, `eagle2:depth=8+survival:max_tokens=64`, an artifact folder, a
reference such as `s3://bucket/registry/NAME@prod`, or a composition: a shape, then `+` and parts
that replace its budget or acceptance. docs/policies.md lists words and settings.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from specctl.artifacts.compatibility import Expected, check_expected
from specctl.artifacts.manifest import REPORT_JSON
from specctl.errors import LossyPolicyError, UsageError, did_you_mean, refusals_of
from specctl.policy import Policy, StepCost, StepCosts, check_costs, parse_policy, with_costs
from specctl.policy.families import PARTS, WORDS, family_of
from specctl.records import Record, canonical_json, violated_rule
from specctl.runtime.references import artifact_at, is_artifact, is_meant_as_artifact

if TYPE_CHECKING:
    from specctl.artifacts.load import Artifact

_NAMED = re.compile(r"([A-Za-z][\w.-]*)=(.+)")
_NUMBERS = re.compile(r"[0-9]+(?:x[0-9]+(?:/[0-9]+)?)?")
"""Settings without their names, of `chain:5` or `eagle2:4x2/8`."""
_SHORT = {word: one.short for part in PARTS.values() for one in part for word in one.words}


@dataclass(frozen=True)
class NamedPolicy:
    """A policy with its name."""

    label: str  # in tables
    policy: Policy
    artifact_digest: str | None = None  # of a policy that is one whole artifact
    parts: tuple[tuple[str, Artifact], ...] = ()
    """Artifacts by the part that they supply (`shape`, `budget`, `acceptance`)."""
    spec: str = ""  # the user's words

    def fitted_on(self, prompts: Iterable[str]) -> set[str]:
        """The prompts among some that a part of it was fitted on."""
        prompts = tuple(prompts)
        evidence = [artifact.manifest.evidence for _, artifact in self.parts]
        return set[str]().union(
            *(one.was_fitted_on(prompts) for one in evidence if one is not None)
        )


def resolve_policy(
    spec: str,
    pair: Expected | None = None,
    *,
    allow_lossy: bool = False,
    step_cost: StepCost | StepCosts | None = None,
    offline: bool = False,
) -> NamedPolicy:
    """The policy of a user's words.

    Args:
        spec: an artifact folder, `REGISTRY/NAME@ALIAS` (`SPECCTL_REGISTRY` replaces a missing
            `REGISTRY/`), or a shape's name with `:field=value` settings; then `+` and a budget or
            an acceptance, in words or as an artifact, which replaces the first one's.
        pair: the pair or `Expectation` that the policy must fit; None skips the check.
        allow_lossy: accept policies that change the distribution of the text.
        step_cost: for a budget that needs step costs and has none.
        offline: resolve references by the cache; a warning says so.

    Raises:
        UsageError: unknown name or field, parts that do not fit together, or a budget without
            the step costs that it needs.
        ArtifactError: an artifact must not be loaded.
        RegistryError, StoreError: a registry refuses, or cannot be read.
        LossyPolicyError: a lossy policy without `allow_lossy`.
    """
    named = _composed(spec, partial(artifact_at, expect=pair, offline=offline))
    if step_cost is not None:
        named = replace(named, policy=with_costs(named.policy, step_cost))
    if not named.policy.lossless and not allow_lossy:
        raise LossyPolicyError(
            f"policy {named.label} is lossy: acceptance {named.policy.acceptance.kind} changes the "
            "text",
            hint="pass --allow-lossy if that is acceptable",
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
    """Several comma-separated policies, optionally as `NAME=POLICY`; else the user's words are the
    label, whatever stands beside it.

    Raises:
        UsageError: the same policy twice, or an empty name; see also `resolve_policy`.
    """
    words = [_name_and_spec(word.strip()) for word in specs.split(",")]
    named = []
    for name, spec in words:
        found = resolve_policy(
            spec, pair, allow_lossy=allow_lossy, step_cost=step_cost, offline=offline
        )
        named.append(replace(found, label=name or spec))
    if len({item.label for item in named}) < len(named):
        raise UsageError(f"policies {specs}: give each of them once")
    return named


def _name_and_spec(word: str) -> tuple[str, str]:
    """Splits `best=tuned/policy`; the name may be empty."""
    found = _NAMED.fullmatch(word)
    if found is None or os.path.isdir(word):
        return "", word
    name, spec = found.groups()
    if name in WORDS["shape"]:
        raise UsageError(f"policy {word!r}: {name} is a policy; choose another name before =")
    return name, spec


def check_words(specs: Iterable[str]) -> None:
    """Rejects words that name no policy, and folders that hold no artifact, before models load.

    References to registries are resolved later, and so is whether an artifact fits the pair.
    """
    for _, spec in map(_name_and_spec, specs):
        if all(os.path.isdir(piece) or not names_artifact(piece) for piece in pieces(spec)):
            _composed(spec, partial(artifact_at, expect=None))


def check_policies(named: Iterable[NamedPolicy], expect: Expected) -> None:
    """Rejects artifacts of another pair or domain, once the pair is loaded."""
    artifacts = {one.digest: (policy.spec, one) for policy in named for _, one in policy.parts}
    for spec, artifact in artifacts.values():
        with refusals_of(spec):
            check_expected(artifact.manifest, expect)


# --------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class _Given:
    """One part of a composition."""

    part: str
    record: Any
    artifact: Artifact | None = None  # its source, if it is one


def _composed(spec: str, load: Callable[[str], Artifact]) -> NamedPolicy:
    first, *rest = pieces(spec)
    base = _given(spec, first, load, is_first=True)
    added = [one for piece in rest for one in _given(spec, piece, load, is_first=False)]
    for part, number in Counter(one.part for one in added).most_common(1):
        if number > 1:
            raise UsageError(f"policy {spec!r} has {number} parts {part} behind the shape, not one")
    given = {one.part: one for one in [*base, *added]}
    try:
        policy = parse_policy(canonical_json({part: one.record for part, one in given.items()}))
    except UsageError as error:
        raise _bad_setting(spec, given, error) from error
    parts = tuple((part, one.artifact) for part, one in given.items() if one.artifact)
    if parts and not rest:
        return NamedPolicy(policy.name, policy, parts[0][1].digest, parts, spec)
    artifact = base[0].artifact
    label = "+".join([artifact.policy.name if artifact else first, *rest])
    return NamedPolicy(label, policy, None, parts, spec)


def _hidden_folder(spec: str, otherwise: str) -> str:
    """The hint on folders that known words hide, else another one."""
    found = list(pieces(spec))
    meant = "+".join(f"./{one}" if part_of(one) and is_artifact(one) else one for one in found)
    return otherwise if meant == spec else f"write {meant} for the folder of that name"


def _bad_setting(spec: str, given: dict[str, _Given], error: UsageError) -> UsageError:
    what, cause = f"policy {spec!r}", error.__cause__
    assert isinstance(cause, ValidationError)
    place, rule, kind, _ = violated_rule(cause)
    record = given[str(place[0]) if place else "shape"].record
    known = (one for part in PARTS.values() for one in part if one.kind == record["kind"])
    fields = [name for name in next(known).record.model_fields if name != "kind"]
    named = f"{record['kind']} has the settings {', '.join(fields)}"
    fix = _hidden_folder(spec, named if fields else "leave the other part out")
    if len(place) < 3:  # not part, kind, field
        return UsageError(f"{what}: {rule}", hint=fix)
    part, _, field, *_ = place
    if kind == "missing":
        return UsageError(f"{what} needs {field}=VALUE", hint=fix)
    found = given[part].record.get(field)
    return UsageError(f"{what}: {field} is {found!r}, but must be {rule}", hint=fix)


def _given(
    spec: str, piece: str, load: Callable[[str], Artifact], *, is_first: bool
) -> list[_Given]:
    """The parts of a piece: of the first one a shape, or all parts of an artifact; of others the
    parts that they replace."""
    if names_artifact(piece):
        artifact = load(piece)
        policy = artifact.policy
        parts = ({"shape": policy.shape} if is_first else {}) | policy.additions
        if not parts:
            raise UsageError(
                f"policy {spec!r}: behind '+' stands {piece}, which has no budget or acceptance",
                hint="put the artifact that gives the shape first",
            )
        return [_Given(part, one.model_dump(mode="json"), artifact) for part, one in parts.items()]
    part = part_of(piece)
    if part is not None and is_first == (part == "shape"):
        return [_Given(part, record_of(piece))]
    word = re.split("[:+]", piece, maxsplit=1)[0]
    if is_first and part is not None:
        noun = {"budget": "a budget", "acceptance": "an acceptance"}[part]
        raise UsageError(
            f"policy {spec!r} begins with {noun}",
            hint=_hidden_folder(spec, f"put a shape before it: eagle2+{spec}"),
        )
    if is_first:
        listed = "word of a policy (ar, chain, eagle2, ...)"
        unlike = "file or folder" if re.search(r"/|\.json$", word) else listed
        raise UsageError(
            f"policy {spec!r} is no {unlike}, no artifact's folder and no REGISTRY/NAME@ALIAS",
            hint=did_you_mean(
                word, [*WORDS["shape"], *fitted_folders()], "check the name or the path"
            ),
        )
    others = [word for kind, words in WORDS.items() if kind != "shape" for word in words]
    if part:
        raise UsageError(
            f"policy {spec!r} has another shape, {piece!r}, behind '+'; give one",
            hint=_hidden_folder(spec, "leave one of them out"),
        )
    raise UsageError(
        f"policy {spec!r}: {piece!r} behind '+' is none of {', '.join(others)}, and no artifact",
        hint=did_you_mean(word, others, "check the name or the path"),
    )


# --------------------------------------------------------------------------- words


def pieces(spec: str) -> Iterator[str]:
    """The pieces between the pluses of a spec; names of artifacts may contain pluses."""
    words = spec.split("+")
    while words:
        size = _longest(words)
        yield "+".join(words[:size])
        words = words[size:]


def _longest(words: list[str]) -> int:
    """Words of the first piece: of an existing artifact, else of text that looks like one."""
    if part_of(words[0]) is None:
        for is_one in (is_artifact, is_meant_as_artifact):
            for size in range(len(words), 0, -1):
                if is_one("+".join(words[:size])):
                    return size
    return 1


def fitted_folders() -> list[str]:
    """The artifacts of fits in the working directory, for hints; `./echo` where the name is a
    word."""
    found = (path.parent.name for path in Path().glob(f"*/{REPORT_JSON}"))
    return sorted(f"./{name}" if part_of(name) else name for name in found)


def names_artifact(piece: str) -> bool:
    """Whether a piece names an artifact, present or not. A known word never does, so that a folder
    cannot change its meaning; `./chain` names the folder."""
    return part_of(piece) is None and (is_artifact(piece) or is_meant_as_artifact(piece))


def part_of(piece: str) -> str | None:
    """The part that a piece's first word belongs to; None for an unknown word."""
    name = re.split("[:+]", piece, maxsplit=1)[0]
    return next((part for part, known in WORDS.items() if name in known), None)


def record_of(piece: str) -> dict[str, Any]:
    """The record of a known word with its settings, as plain values."""
    name, settings = piece.partition(":")[0], settings_of(piece)
    family = next(one for part in PARTS.values() for one in part if name in one.words)
    known = [field for field in family.record.model_fields if field != "kind"]
    names: list[str] = []
    found: dict[str, Any] = {"kind": family.kind, **family.words[name]}
    for word in settings:
        field, _, value = word.partition("=")
        if not field or not value:
            raise UsageError(
                f"policy {piece!r}: {word!r} is no setting; write field=value, separated by colons",
                hint="such as eagle2:depth=6:top_k=8",
            )
        if field not in known:
            raise UsageError(
                f"policy {piece!r}: {field!r} is no setting of {name}, which has "
                f"{', '.join(known) or 'none'}",
                hint=did_you_mean(field, known, "leave it out"),
            )
        names.append(field)
        values = [_value(part) for part in value.removesuffix("/").split("/")]
        found[field] = values if "/" in value else values[0]  # gate_levels=1/ is a list of one
    if len(set(names)) < len(names):
        raise UsageError(f"policy {piece!r} has a setting twice: {', '.join(names)}")
    return found


def settings_of(piece: str) -> list[str]:
    """The settings behind a word or an artifact as `field=value`, also those given as numbers."""
    word, *settings = piece.split(":")
    numbers = re.split("[x/]", settings[0]) if settings and _NUMBERS.fullmatch(settings[0]) else []
    short = _SHORT.get(word, ())
    if 0 < len(numbers) <= len(short):
        settings[:1] = map("=".join, zip(short, numbers, strict=False))
    return settings


def spec_of(word: str, settings: Mapping[str, Any]) -> str:
    """A word or an artifact with settings, as `--policy` takes it: `chain:5` where numbers do."""
    short = _SHORT.get(word, ())
    if short and {*settings} == {*short}:
        numbers = (str(settings[name]) for name in short)
        return word + "".join(map("".join, zip(":x/", numbers, strict=False)))
    return ":".join([word, *(f"{name}={value}" for name, value in settings.items())])


def words_of(policy: Policy) -> str | None:
    """The words of a policy, inverse to `record_of`; None if a part has no word or a setting cannot
    be written in one, as in fitted policies."""
    found = [words_of_part(one) for one in (policy.shape, *policy.additions.values())]
    return None if None in found else "+".join(map(str, found))


def words_of_part(record: Record) -> str | None:
    """The shortest words of a part's record; None if there are none."""
    own, found = record.model_dump(mode="json"), []
    fields = {name: field.default for name, field in type(record).model_fields.items()}
    defaults = {name: list(one) if isinstance(one, tuple) else one for name, one in fields.items()}
    for word in family_of(record).words:
        implied = defaults | record_of(word)
        settings = {n: _text(value) for n, value in own.items() if value != implied[n]}
        # None and nested records cannot be written, and a plus ends the part.
        if not any(text == "None" or {*"{+"} & {*text} for text in settings.values()):
            short = {name: own[name] for name in family_of(record).short if settings}
            found.append(spec_of(word, short or settings))
    return min(found, key=len, default=None)


def _text(value: Any) -> str:
    """A setting as `record_of` reads it: slashes part the values of a list and end a single one."""
    if isinstance(value, list):
        return "/".join(map(_text, value)) + "/" * (len(value) == 1)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(text: str) -> Any:
    """A number, a bool, or the text itself, which the record checks."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    return {"true": True, "false": False}.get(text, text)
