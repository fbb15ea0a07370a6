"""Policies by name: `ar`, `chain:num_draft_tokens=6`, `eagle2:depth=8`, or an artifact folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.artifacts.codec import load_artifact
from specctl.artifacts.manifest import PairFingerprint
from specctl.errors import LossyPolicyError, UsageError
from specctl.policy import Policy
from specctl.policy.parse import canonical_json, parse_policy

NAMED_SHAPES = ("ar", "chain", "eagle2")


@dataclass(frozen=True)
class NamedPolicy:
    """A policy, what to call it in tables, and the artifact it came from, if any."""

    label: str
    policy: Policy
    artifact_digest: str | None = None


def resolve_policy(
    spec: str, pair: PairFingerprint | None = None, *, allow_lossy: bool = False
) -> NamedPolicy:
    """The policy that a user named.

    Args:
        spec: an artifact folder, or a shape's name with `:field=value` settings.
        pair: the pair it must fit; None skips the check (inspection only).
        allow_lossy: accept policies that change the target's law.

    Raises:
        UsageError: unknown name or field. ArtifactError: a folder that must not be loaded.
        LossyPolicyError: a lossy policy without `allow_lossy`.
    """
    if spec and Path(spec).is_dir():  # Path('') is the current folder
        artifact = load_artifact(Path(spec), expect=pair)
        named = NamedPolicy(artifact.policy.name, artifact.policy, artifact.digest)
    else:
        named = NamedPolicy(spec, _from_words(spec))
    if not named.policy.lossless and not allow_lossy:
        raise LossyPolicyError(
            f"policy {named.label}",
            expected="a lossless acceptance",
            found=named.policy.acceptance.kind,
            fix="pass --allow-lossy if changed text is acceptable",
        )
    return named


def resolve_policies(
    specs: str, pair: PairFingerprint | None = None, *, allow_lossy: bool = False
) -> list[NamedPolicy]:
    """Several comma-separated policies; two of one label are told apart by their spec.

    Raises:
        UsageError: the same policy twice, or an empty name; see also `resolve_policy`.
    """
    words = [word.strip() for word in specs.split(",")]
    named = [resolve_policy(word, pair, allow_lossy=allow_lossy) for word in words]
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
    name, *settings = spec.split(":")
    if name not in NAMED_SHAPES:
        raise UsageError(
            "policy",
            expected=f"{', '.join(NAMED_SHAPES)} or the folder of an artifact",
            found=repr(spec),
            fix="check the name or the path",
        )
    fields = dict(_setting(spec, word) for word in settings)
    return parse_policy(canonical_json({"shape": {"kind": name, **fields}}))


def _setting(spec: str, word: str) -> tuple[str, Any]:
    field, equals, value = word.partition("=")
    if not equals or not value.isdigit():
        raise UsageError(
            f"policy {spec!r}",
            expected="settings such as eagle2:depth=6:top_k=8:num_tokens=48",
            found=repr(word),
            fix="give whole numbers as field=value, separated by colons",
        )
    return field, int(value)
