"""Writes an artifact folder, with the provenance of the code that writes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specctl.artifacts.files import MAX_BYTES, publish_folder, read_folder
from specctl.artifacts.load import (
    Artifact,
    checked_features_digest,
    load_files,
)
from specctl.artifacts.manifest import (
    ARTIFACT_VERSION,
    CARD,
    MANIFEST,
    REPORT_JSON,
    TENSORS,
    TWIN,
    FileEntry,
    Manifest,
    Origin,
    Provenance,
    manifest_bytes,
)
from specctl.artifacts.onnx_twin import twin_bytes
from specctl.artifacts.selftest import selftest_tensors
from specctl.artifacts.tensors import policy_tensors, policy_tree, write_tensors
from specctl.errors import ArtifactError, RecordError, refusals_of
from specctl.policy import OwnShape, Policy

RECORDED_LIBRARIES = ("numpy", "onnx", "polars", "pydantic", "safetensors", "scikit-learn", "torch")
_PACKAGE = Path(__file__).parents[1]
A_FAMILY = "make it a family: docs/architecture.md, To add something"


def save_artifact(
    folder: Path | str,
    policy: Policy,
    origin: Origin,
    *,
    card: str,
    report: bytes | None = None,
) -> Artifact:
    """Writes an artifact folder atomically, after loading it once.

    Args:
        folder: a new place, an empty folder, or an older artifact, which is replaced.
        card: the text of `README.md`.
        report: bytes of `report.json`.

    Raises:
        OutputError: the place cannot be written, or holds something else.
        ArtifactError: the loader would refuse the policy.
    """
    with refusals_of(str(folder)):
        if isinstance(policy.shape, OwnShape):
            problem = f"the rule {policy.shape.name} is Python's, and artifacts hold parameters"
            raise ArtifactError("E_SCHEMA", "shape", problem, hint=A_FAMILY)
        tensors = {**policy_tensors(policy), **selftest_tensors(policy)}
        files = {TENSORS: write_tensors(tensors), CARD: card.encode()}
        files |= {} if report is None else {REPORT_JSON: report}
        twin = twin_bytes(policy)
        if twin is not None:
            files[TWIN] = twin
        manifest = _manifest(policy, origin, files)
        contents = {MANIFEST: manifest_bytes(manifest), **files}
        for name, data in contents.items():
            most = MAX_BYTES.get(name, len(data))
            if len(data) > most:
                of_policy = name in (TENSORS, TWIN)
                fix = "choose a smaller policy, e.g. of fewer nodes" if of_policy else "shorten it"
                problem = f"{len(data)} bytes, more than {most}; nothing was written"
                raise ArtifactError("E_SIZE", name, problem, hint=fix)
        return publish_folder(
            Path(folder).absolute(),
            contents,
            lambda staged: load_files(read_folder(staged), artifact=str(folder)),
        )


def _manifest(policy: Policy, origin: Origin, files: Mapping[str, bytes]) -> Manifest:
    from specctl.version import __version__

    features = policy.shape.reads
    try:
        return Manifest(
            artifact_version=ARTIFACT_VERSION,
            policy=policy_tree(policy),
            lossless=policy.lossless,
            features=features,
            feature_digest=checked_features_digest(features),
            pair=origin.pair,
            domain=origin.domain,
            evidence=origin.evidence,
            fit=origin.fit,
            provenance=Provenance(
                specctl_version=__version__,
                library_versions=dict(_library_versions()),
                created=origin.created,
                parent=origin.parent,
                source_digest=source_digest(),
            ),
            files={name: FileEntry.of(data) for name, data in files.items()},
        )
    except RecordError as error:
        problem = f"the facts of this fit are invalid: {error.message}"
        raise ArtifactError("E_SCHEMA", MANIFEST, problem, hint="nothing was written") from None


@cache
def source_digest() -> str:
    """`sha256:<hex>` over names and bytes of the package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{digest.hexdigest()}"


def _library_versions() -> Iterator[tuple[str, str]]:
    for name in RECORDED_LIBRARIES:
        with suppress(PackageNotFoundError):  # not for this platform
            yield name, version(name)
