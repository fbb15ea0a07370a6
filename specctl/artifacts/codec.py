"""Policies to and from artifact folders; docs/artifact-format.md states the rules and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specctl.artifacts import checks
from specctl.artifacts.files import publish_folder, read_folder
from specctl.artifacts.manifest import (
    ARTIFACT_VERSION,
    CARD,
    MANIFEST,
    TENSORS,
    TWIN,
    FileEntry,
    Manifest,
    Origin,
    PairFingerprint,
    digest_of,
    manifest_bytes,
    parse_manifest,
    provenance,
)
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.artifacts.tensors import (
    join_policy,
    policy_tensors,
    policy_tree,
    read_tensors,
    write_tensors,
)
from specctl.policy.records import Policy


@dataclass(frozen=True)
class Artifact:
    """A policy that passed every check, with what its manifest says of it.

    Attributes:
        digest: identity, `sha256:<hex>` of the manifest.
    """

    policy: Policy
    manifest: Manifest
    digest: str


def save_artifact(
    folder: Path | str,
    policy: Policy,
    origin: Origin,
    *,
    card: str,
    reports: Mapping[str, bytes] | None = None,
) -> Artifact:
    """Writes an artifact folder atomically; what is written has been loaded once.

    Args:
        folder: a new place, an empty folder, or an older artifact, which is replaced.
        card: the text of `README.md`.
        reports: bytes of `report.json` and `report.png`, by name.

    Raises:
        OutputError: a place that cannot be written, or that holds something else.
        ArtifactError: a policy that the loader would refuse.
    """
    files = {**_payload(policy), CARD: card.encode(), **(reports or {})}
    manifest = _manifest(policy, origin, files)
    contents = {MANIFEST: manifest_bytes(manifest), **files}
    return publish_folder(Path(folder).absolute(), contents, load_artifact)


def load_artifact(
    folder: Path | str, *, expect: PairFingerprint | None = None, digest: str | None = None
) -> Artifact:
    """Reads an artifact, or refuses it at the first rule that it breaks.

    Args:
        expect: the pair that is about to run; None to look at an artifact without running it.
        digest: the identity that the caller wants.

    Raises:
        ArtifactError: its `code` is the rule of docs/artifact-format.md.
    """
    contents = read_folder(Path(folder))
    checks.check_required(contents)
    manifest = parse_manifest(contents[MANIFEST])
    identity = digest_of(contents[MANIFEST])
    checks.check_identity(identity, digest)
    checks.check_files(manifest, contents)
    checks.check_pair(manifest.pair, expect)
    checks.check_feature_digest(manifest)
    policy = join_policy(manifest.policy, read_tensors(contents[TENSORS]))
    checks.check_features_read(manifest, policy)
    checks.check_class(manifest, policy)
    checks.check_twin(policy, contents.get(TWIN))
    return Artifact(policy, manifest, identity)


def _payload(policy: Policy) -> dict[str, bytes]:
    files = {TENSORS: write_tensors(policy_tensors(policy))}
    twin = twin_bytes(policy)
    return files if twin is None else {**files, TWIN: twin}


def _manifest(policy: Policy, origin: Origin, files: Mapping[str, bytes]) -> Manifest:
    features = checks.policy_features(policy)
    return Manifest(
        artifact_version=ARTIFACT_VERSION,
        policy=policy_tree(policy),
        lossless=policy.lossless,
        features=features,
        feature_digest=checks.checked_features_digest(features),
        pair=origin.pair,
        evidence=origin.evidence,
        fit=origin.fit,
        provenance=provenance(origin),
        files={
            name: FileEntry(digest=digest_of(data), size_bytes=len(data))
            for name, data in files.items()
        },
    )
