"""What `config.json` may say: strict, canonical, versioned (docs/artifact-format.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import JsonValue, ValidationError

from specctl.artifacts.facts import (
    Count,
    Digest,
    Domain,
    Evidence,
    FileEntry,
    Metric,
    Name,
    PairFingerprint,
    Provenance,
    Range,
    Settings,
    SplitSize,
    UtcTime,
    as_metrics,
    utc_now,
)
from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json, describe_violation
from specctl.policy.records import Record

__all__ = [
    "ARTIFACT_VERSION",
    "CARD",
    "MANIFEST",
    "REPORT_JSON",
    "REPORT_PNG",
    "SELFTEST",
    "SIGNATURE",
    "TENSORS",
    "TWIN",
    "Count",
    "Digest",
    "Domain",
    "Evidence",
    "FileEntry",
    "Manifest",
    "Metric",
    "Name",
    "Origin",
    "PairFingerprint",
    "Provenance",
    "Range",
    "SplitSize",
    "UtcTime",
    "as_metrics",
    "digest_of",
    "manifest_bytes",
    "parse_manifest",
    "utc_now",
]

ARTIFACT_VERSION = 1
MANIFEST, TENSORS, TWIN, CARD = "config.json", "policy.safetensors", "policy.onnx", "README.md"
REPORT_JSON, REPORT_PNG = "report.json", "report.png"
SELFTEST = "selftest.safetensors"
SIGNATURE = "signature.dsse.json"
"""Beside the listed files: it signs the manifest, so that cannot list it."""


class Manifest(Record):
    """All of `config.json`; the fields are explained in docs/artifact-format.md."""

    artifact_version: int
    policy: dict[str, JsonValue]
    lossless: bool
    features: tuple[str, ...]
    feature_digest: Digest
    pair: PairFingerprint
    domain: Domain | None
    evidence: Evidence | None
    fit: Settings | None
    provenance: Provenance
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from: what the writer must be told.

    Attributes:
        pair: the models it is for.
        evidence, fit: data and configuration of the fit; None for a policy set by hand.
        domain: what the evidence was gathered on; None where there is none.
        parent: digest of the artifact that it descends from.
        created: UTC, `2026-01-31T12:00:00Z`.
    """

    pair: PairFingerprint
    evidence: Evidence | None = None
    fit: dict[str, JsonValue] | None = None
    domain: Domain | None = None
    parent: str | None = None
    created: str = field(default_factory=utc_now)

    def of_sets(self, snapshots: Sequence[str]) -> Origin:
        """With the snapshots of several sets in `fit`; that of one is `evidence.trace_digest`."""
        if len(snapshots) < 2:
            return self
        return replace(self, fit={**(self.fit or {}), "snapshots": list(snapshots)})


def digest_of(data: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def manifest_bytes(manifest: Manifest) -> bytes:
    """The one byte string that stands for a manifest; its digest is the artifact's identity."""
    return canonical_json(manifest.model_dump(mode="json")).encode()


def parse_manifest(data: bytes) -> Manifest:
    """The manifest of `config.json`.

    Raises:
        ArtifactError: E_MANIFEST for JSON that is ambiguous or not canonical, E_SCHEMA for
            another version or other fields.
    """
    tree = parse_strict(data)
    _check_version(tree)
    if canonical_json(tree).encode() != data:
        raise ArtifactError(
            "E_MANIFEST",
            MANIFEST,
            expected="canonical JSON (sorted keys, no white space)",
            found="other bytes for the same values",
        )
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise _other_fields(describe_violation(error)) from None
    # A field left out reads as null, and 1 as 1.0: the digest must stand for one text alone.
    if manifest_bytes(manifest) != data:
        raise _other_fields("some left out, or numbers in another form")
    return manifest


def _check_version(tree: Any) -> None:
    found = tree.get("artifact_version") if isinstance(tree, dict) else None
    if type(found) is int and found == ARTIFACT_VERSION:
        return
    raise ArtifactError(
        "E_SCHEMA",
        f"{MANIFEST}, artifact_version",
        expected=str(ARTIFACT_VERSION),
        found="none" if found is None else repr(found)[:64],
        fix="use the version of specctl that wrote it, or fit the policy again",
    )


def _other_fields(found: str) -> ArtifactError:
    expected = f"the fields of artifact version {ARTIFACT_VERSION}"
    return ArtifactError("E_SCHEMA", MANIFEST, expected=expected, found=found)
