"""The one loader: from bytes of strangers to a policy, or to a refusal at the first broken rule.

docs/artifact-format.md states the rules and why. There is no other way in, no fallback, and
nothing that could run code from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specctl.artifacts import checks
from specctl.artifacts.compatibility import Expected, check_expected
from specctl.artifacts.evidence_check import check_evidence
from specctl.artifacts.files import check_sizes, read_folder
from specctl.artifacts.isolation import load_isolated
from specctl.artifacts.limits import check_cost
from specctl.artifacts.manifest import (
    CARD,
    MANIFEST,
    REPORT_JSON,
    SELFTEST,
    TENSORS,
    TWIN,
    Manifest,
    digest_of,
    parse_manifest,
)
from specctl.artifacts.privacy import check_private
from specctl.artifacts.safetensors_header import check_header
from specctl.artifacts.selftest import check_selftest
from specctl.artifacts.strict_json import parse_strict
from specctl.artifacts.tensors import join_policy, read_tensors
from specctl.artifacts.text_warning import warn_of_text
from specctl.artifacts.twin_check import check_twin
from specctl.artifacts.verified import is_verified, mark_verified
from specctl.errors import refusals_of
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


@dataclass(frozen=True)
class Wanted:
    """What the caller asks of an artifact, beyond that it is sound.

    Attributes:
        pair: the pair, or more, that is about to run; None to look at it without running it.
        digest: its identity; None for any.
    """

    pair: Expected | None = None
    digest: str | None = None


def load_artifact(
    folder: Path | str,
    *,
    expect: Expected | None = None,
    digest: str | None = None,
) -> Artifact:
    """Reads an artifact, or refuses it at the first rule that it breaks.

    Args:
        expect: the pair that is about to run, or all that an `Expectation` says; None to look at
            an artifact without running it.
        digest: the identity that the caller wants.

    Raises:
        ArtifactError: its `code` is the rule of docs/artifact-format.md.
    """
    folder = Path(folder)
    files = read_folder(folder)
    return load_files(files, expect=expect, digest=digest, artifact=str(folder))


def load_files(
    contents: Mapping[str, bytes],
    *,
    expect: Expected | None = None,
    digest: str | None = None,
    artifact: str | None = None,
) -> Artifact:
    """The same of files that are in memory, e.g. fetched and not yet written anywhere.

    What this user never loaded before is loaded in a child process first. Who signed the digest,
    and whether it is fresh, a registry asks before it fetches the files (`registry.pulling`).

    Args:
        artifact: what a refusal calls it: a folder or a reference; None is its digest.
    """
    with refusals_of(artifact or _digest_in(contents)):
        return checked(contents, Wanted(expect, digest), isolate=True)


def _digest_in(contents: Mapping[str, bytes]) -> str | None:
    return digest_of(contents[MANIFEST]) if MANIFEST in contents else None


def checked(contents: Mapping[str, bytes], wanted: Wanted, *, isolate: bool = False) -> Artifact:
    """Every check, in this process; with `isolate` in a child first, unless it passed before."""
    check_sizes(contents)
    checks.check_required(contents)
    identity = digest_of(contents[MANIFEST])
    checks.check_identity(identity, wanted.digest)
    manifest = parse_manifest(contents[MANIFEST])
    checks.check_files(manifest, contents)
    check_expected(manifest, wanted.pair)
    checks.check_feature_digest(manifest)
    policy = _static(manifest, contents)
    first = isolate and not is_verified(identity)
    if first:
        load_isolated(contents)
    check_selftest(policy, contents.get(SELFTEST))
    if first:
        mark_verified(identity)
    return Artifact(policy, manifest, identity)


def _static(manifest: Manifest, contents: Mapping[str, bytes]) -> Policy:
    """The policy record of a manifest, after what can be judged without building or running it."""
    card = contents[CARD].decode("utf-8", "replace")
    report = parse_strict(contents[REPORT_JSON], REPORT_JSON) if REPORT_JSON in contents else None
    check_private(manifest.model_dump(mode="json"), {CARD: card}, report)
    warn_of_text(CARD, card)
    check_evidence(manifest, report)
    policy = join_policy(manifest.policy, read_tensors(contents[TENSORS]))
    checks.check_features_read(manifest, policy)
    checks.check_class(manifest, policy)
    check_cost(policy)
    check_twin(policy, contents.get(TWIN))
    if SELFTEST in contents:
        check_header(SELFTEST, contents[SELFTEST])
    return policy
