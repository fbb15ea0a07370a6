"""Manifests of version 1, read for good: what they lack is null in today's record."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import JsonValue

from specctl.artifacts.facts import (
    Count,
    Digest,
    FileEntry,
    Name,
    PairFingerprint,
    Settings,
    SplitSize,
    UtcTime,
    as_metrics,
)
from specctl.policy.base import Record


class EvidenceV1(Record):
    """Figures were plain numbers, without intervals."""

    trace_digest: Digest
    num_prompts: Count
    num_rounds: Count
    splits: dict[Name, SplitSize]
    metrics: dict[Name, float | None]


class ProvenanceV1(Record):
    """Without identities of code and libraries."""

    specctl_version: Name
    library_versions: dict[Name, Name]
    created: UtcTime
    parent: Digest | None


class ManifestV1(Record):
    """Without the domain of the evidence."""

    artifact_version: Literal[1]
    policy: dict[str, JsonValue]
    lossless: bool
    features: tuple[str, ...]
    feature_digest: Digest
    pair: PairFingerprint
    evidence: EvidenceV1 | None
    fit: Settings | None
    provenance: ProvenanceV1
    files: dict[str, FileEntry]

    def upgraded(self) -> dict[str, Any]:
        """The fields of today's manifest."""
        fields: dict[str, Any] = {**dict(self), "domain": None}
        fields["provenance"] = self.provenance.model_dump()
        if self.evidence is not None:
            evidence = dict(self.evidence)
            fields["evidence"] = {**evidence, "metrics": as_metrics(self.evidence.metrics)}
        return fields


def tree_v1(tree: dict[str, Any]) -> dict[str, Any]:
    """JSON values of version 1 from those of today's record; inverse of `upgraded`."""
    tree = {name: value for name, value in tree.items() if name in ManifestV1.model_fields}
    kept = ProvenanceV1.model_fields
    tree["provenance"] = {name: tree["provenance"][name] for name in kept}
    if tree["evidence"] is not None:
        metrics = {name: metric["value"] for name, metric in tree["evidence"]["metrics"].items()}
        tree["evidence"] = {**tree["evidence"], "metrics": metrics}
    return tree
