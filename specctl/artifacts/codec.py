"""Policies to and from artifact folders; docs/artifact-format.md states the rules and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from specctl.artifacts import checks
from specctl.artifacts.files import MAX_BYTES, publish_folder, read_folder
from specctl.artifacts.installation import provenance
from specctl.artifacts.loading import Artifact, LoadRequest, checked, load_artifact, load_files
from specctl.artifacts.manifest import (
    ARTIFACT_VERSION,
    CARD,
    MANIFEST,
    SELFTEST,
    TENSORS,
    TWIN,
    FileEntry,
    Manifest,
    Origin,
    digest_of,
    manifest_bytes,
)
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.artifacts.selftest import selftest_bytes
from specctl.artifacts.tensors import policy_tensors, policy_tree, write_tensors
from specctl.errors import ArtifactError, refusals_of
from specctl.policy.parse import describe_violation
from specctl.policy.records import Policy

__all__ = ["Artifact", "load_artifact", "load_files", "save_artifact"]


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
    with refusals_of(str(folder)):
        files = {**_payload(policy), CARD: card.encode(), **(reports or {})}
        manifest = _checked_manifest(policy, origin, files)
        contents = {MANIFEST: manifest_bytes(manifest), **files}
        _check_fits(contents)
        return publish_folder(Path(folder).absolute(), contents, _load_own)


def _check_fits(contents: Mapping[str, bytes]) -> None:
    """Refuses what the loader would call too large, in the words of who writes it (E_SIZE)."""
    for name, data in contents.items():
        most = MAX_BYTES.get(name, len(data))
        if len(data) > most:
            of_policy = name in (TENSORS, SELFTEST, TWIN)
            fix = "choose a smaller policy, e.g. of fewer nodes" if of_policy else "shorten it"
            raise ArtifactError(
                "E_SIZE",
                name,
                expected=f"at most {most} bytes",
                found=f"{len(data)}",
                fix=f"{fix}; nothing was written",
            )


def _load_own(folder: Path) -> Artifact:
    """The artifact that was just written, loaded by the rules."""
    return checked(read_folder(folder), LoadRequest())


def _payload(policy: Policy) -> dict[str, bytes]:
    files = {TENSORS: write_tensors(policy_tensors(policy)), SELFTEST: selftest_bytes(policy)}
    twin = twin_bytes(policy)
    return files if twin is None else {**files, TWIN: twin}


def _checked_manifest(policy: Policy, origin: Origin, files: Mapping[str, bytes]) -> Manifest:
    try:
        return _manifest(policy, origin, files)
    except ValidationError as error:
        raise ArtifactError(
            "E_SCHEMA",
            MANIFEST,
            expected="facts of the fit that its manifest can hold",
            found=describe_violation(error),
            fix="correct that; nothing was written",
        ) from None


def _manifest(policy: Policy, origin: Origin, files: Mapping[str, bytes]) -> Manifest:
    features = checks.policy_features(policy)
    return Manifest(
        artifact_version=ARTIFACT_VERSION,
        policy=policy_tree(policy),
        lossless=policy.lossless,
        features=features,
        feature_digest=checks.checked_features_digest(features),
        pair=origin.pair,
        domain=origin.domain,
        evidence=origin.evidence,
        fit=origin.fit,
        provenance=provenance(origin),
        files={
            name: FileEntry(digest=digest_of(data), size_bytes=len(data))
            for name, data in files.items()
        },
    )
