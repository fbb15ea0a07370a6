"""What `config.json` may say: strict, canonical, versioned (docs/artifact-format.md)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from specctl.artifacts.strict_json import parse_strict, shown
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json, describe_violation
from specctl.policy.records import Record

ARTIFACT_VERSION = 1
"""Raised by the rule at the end of docs/artifact-format.md."""
MANIFEST, TENSORS, TWIN, CARD = "config.json", "policy.safetensors", "policy.onnx", "README.md"
REPORT_JSON, REPORT_PNG = "report.json", "report.png"

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,256}$")]
"""Shown to people, so without control characters: a terminal would obey them."""
UtcTime = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]

RECORDED_LIBRARIES = ("numpy", "onnx", "polars", "pydantic", "safetensors", "scikit-learn", "torch")


class PairFingerprint(Record):
    """The models that a policy was fitted on. Digests identify, names are for people."""

    target_digest: Digest
    drafter_digest: Digest
    tokenizer_digest: Digest
    target: Name
    drafter: Name


class SplitSize(Record):
    """Prompts and decoding rounds on one side of a split."""

    num_prompts: Count
    num_rounds: Count


class Evidence(Record):
    """The data behind a policy.

    Attributes:
        splits: sizes by name, `train` and `held_out`.
        metrics: figures by name; null where the data do not define one.
    """

    trace_digest: Digest
    num_prompts: Count
    num_rounds: Count
    splits: dict[Name, SplitSize]
    metrics: dict[Name, float | None]

    @classmethod
    def of_splits(
        cls,
        trace_digest: str,
        splits: dict[str, SplitSize],
        metrics: dict[str, float | None],
    ) -> Evidence:
        """Of data that the splits divide."""
        return cls(
            trace_digest=trace_digest,
            num_prompts=sum(size.num_prompts for size in splits.values()),
            num_rounds=sum(size.num_rounds for size in splits.values()),
            splits=splits,
            metrics=metrics,
        )


class Provenance(Record):
    """Who wrote an artifact, with what, when (UTC), and what it descends from."""

    specctl_version: Name
    library_versions: dict[Name, Name]
    created: UtcTime
    parent: Digest | None


class FileEntry(Record):
    """Identity and size of one file of the folder."""

    digest: Digest
    size_bytes: Count


class Manifest(Record):
    """All of `config.json`; the fields are explained in docs/artifact-format.md."""

    artifact_version: int
    policy: dict[str, JsonValue]
    lossless: bool
    features: tuple[str, ...]
    feature_digest: Digest
    pair: PairFingerprint
    evidence: Evidence | None
    fit: dict[str, JsonValue] | None
    provenance: Provenance
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from: what the writer must be told.

    Attributes:
        pair: the models it is for.
        evidence, fit: data and configuration of the fit; None for a policy set by hand.
        parent: digest of the artifact that it descends from.
        created: UTC, `2026-01-31T12:00:00Z`.
    """

    pair: PairFingerprint
    evidence: Evidence | None = None
    fit: dict[str, JsonValue] | None = None
    parent: str | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))


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
    _check_canonical(tree, data)
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise ArtifactError(
            "E_SCHEMA",
            MANIFEST,
            expected=f"the fields of artifact version {ARTIFACT_VERSION}",
            found=shown(describe_violation(error)),
        ) from None


def _check_version(tree: Any) -> None:
    found = tree.get("artifact_version") if isinstance(tree, dict) else None
    if type(found) is not int or found != ARTIFACT_VERSION:
        raise ArtifactError(
            "E_SCHEMA",
            f"{MANIFEST}, artifact_version",
            expected=str(ARTIFACT_VERSION),
            found="none" if found is None else repr(found)[:64],
            fix="use the version of specctl that wrote it, or fit the policy again",
        )


def _check_canonical(tree: Any, data: bytes) -> None:
    if canonical_json(tree).encode() != data:
        raise ArtifactError(
            "E_MANIFEST",
            MANIFEST,
            expected="canonical JSON (sorted keys, no white space)",
            found="other bytes for the same values",
        )


def provenance(origin: Origin) -> Provenance:
    """Provenance of an artifact written now by this installation."""
    return Provenance(
        specctl_version=version("specctl"),
        library_versions=_library_versions(),
        created=origin.created,
        parent=origin.parent,
    )


def _library_versions() -> dict[str, str]:
    found = {}
    for library in RECORDED_LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue  # a serving box has no fitting libraries; what is absent is not recorded
    return found
