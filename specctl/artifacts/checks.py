"""What the loader verifies between the bytes and the policy, one rule a function."""

from __future__ import annotations

from collections.abc import Mapping

from specctl.artifacts.files import check_name
from specctl.artifacts.limits import check_num_features
from specctl.artifacts.manifest import (
    CARD,
    MANIFEST,
    SELFTEST,
    SIGNATURE,
    TENSORS,
    FileEntry,
    Manifest,
    digest_of,
)
from specctl.errors import ArtifactError
from specctl.features import NODE_FEATURES, ROUND_FEATURES, features_digest
from specctl.policy.records import (
    DynamicDepth,
    EntropyBins,
    EntropyStop,
    JointThreshold,
    OptTree,
    Policy,
    ScoredTree,
    SignalStop,
    SparseGates,
)

REQUIRED_FILES = (MANIFEST, TENSORS, SELFTEST, CARD)
UNPREDICTABLE = frozenset(
    {
        *("token_id", "drawn_token", "next_token", "bonus_token_id", "later_entropy"),
        *("node_match", "path_accepted", "verified", "expanded", "confidence_rank", "tcr"),
        *("num_accepted", "num_emitted", "fully_accepted", "js_distance", "target_logp"),
        *("target_rank", "target_top1_logit", "target_top2_logit", "target_ratio"),
        *("target_margin", "target_entropy"),
    }
)
"""What is known only after a coin was thrown or a later level was drafted. A policy that looked at
one of them would change the text (notes/reliability.md, finding 1)."""
_SIGNAL_FEATURE = {
    "confidence": "draft_logp",
    "entropy": "parent_entropy",
    "sqrt_entropy": "parent_entropy",
    "entropy_bound": "parent_entropy",
    "survival": "joint_prob",
}


def policy_features(policy: Policy) -> tuple[str, ...]:
    """Names of the features that a policy reads, in the order in which it reads them."""
    shape = policy.shape
    if isinstance(shape, EntropyBins):
        return ("phi",)
    if isinstance(shape, ScoredTree):
        return shape.scorer.features
    if isinstance(shape, SparseGates | DynamicDepth | OptTree | JointThreshold):
        return ("joint_prob",)
    if isinstance(shape, EntropyStop):
        return ("parent_entropy",)
    return (_SIGNAL_FEATURE[shape.signal],) if isinstance(shape, SignalStop) else ()


def checked_features_digest(names: tuple[str, ...]) -> str:
    """Digest of registered features (E_PREDICTABLE, E_FEATURES for those that are not)."""
    seen = sorted(UNPREDICTABLE & set(names))
    if seen:
        raise ArtifactError(
            "E_PREDICTABLE",
            "features",
            expected="what is known before the target's tokens are drawn",
            found=str(seen),
        )
    unknown = [name for name in names if name not in NODE_FEATURES.keys() | ROUND_FEATURES.keys()]
    if unknown:
        raise ArtifactError(
            "E_FEATURES",
            "features",
            expected=f"names among {sorted(NODE_FEATURES.keys() | ROUND_FEATURES.keys())}",
            found=str(unknown),
            fix="fit the policy again with this version of specctl",
        )
    return features_digest(names)


def check_required(contents: Mapping[str, bytes]) -> None:
    """Refuses a folder without the files that every artifact has (E_MISSING)."""
    for name in REQUIRED_FILES:
        if name not in contents:
            raise _missing(name)


def check_identity(found: str, wanted: str | None) -> None:
    """Refuses an artifact other than the one that the caller named by digest (E_DIGEST)."""
    if wanted is not None and found != wanted:
        raise ArtifactError("E_DIGEST", "digest", expected=wanted, found=found)


def check_files(manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    """Every listed file is there as listed, and nothing else is.

    Raises:
        ArtifactError: E_PATH, E_NAME, E_MISSING, E_EXTRA or E_DIGEST.
    """
    for name in manifest.files:
        check_name(name)
        if name not in contents:
            raise _missing(name)
    for name, data in contents.items():
        if name not in (MANIFEST, SIGNATURE):
            _check_file(name, data, manifest.files.get(name))
    for name in (MANIFEST, SIGNATURE):
        if name in manifest.files:
            raise _extra(f"{name} in the list, which cannot know its digest")


def _check_file(name: str, data: bytes, entry: FileEntry | None) -> None:
    if entry is None:
        raise _extra(name)
    found = FileEntry(digest=digest_of(data), size_bytes=len(data))
    if found != entry:
        raise ArtifactError(
            "E_DIGEST",
            name,
            expected=f"{entry.size_bytes} bytes, {entry.digest}",
            found=f"{found.size_bytes} bytes, {found.digest}",
            fix="fetch the artifact again",
        )


def check_feature_digest(manifest: Manifest) -> None:
    """Refuses features that mean something else here (E_FEATURES), or too many (E_COST)."""
    check_num_features(manifest.features)
    _check_features_equal(
        f"{list(manifest.features)} with digest {checked_features_digest(manifest.features)}",
        f"{list(manifest.features)} with digest {manifest.feature_digest}",
    )


def check_features_read(manifest: Manifest, policy: Policy) -> None:
    """Refuses a manifest that names other features than its policy reads (E_FEATURES)."""
    _check_features_equal(str(list(policy_features(policy))), str(list(manifest.features)))


def _check_features_equal(expected: str, found: str) -> None:
    if expected != found:
        fix = "fit the policy again with this version of specctl"
        raise ArtifactError("E_FEATURES", "features", expected=expected, found=found, fix=fix)


def check_class(manifest: Manifest, policy: Policy) -> None:
    """Refuses a false `lossless`, and a lossy policy without evidence (E_CLASS)."""
    if manifest.lossless != policy.lossless:
        raise ArtifactError(
            "E_CLASS",
            "lossless flag",
            expected=f"{policy.lossless} for acceptance {policy.acceptance.kind!r}",
            found=str(manifest.lossless),
        )
    if not policy.lossless and manifest.evidence is None:
        raise ArtifactError(
            "E_CLASS",
            "evidence",
            expected="evidence of what a lossy policy costs",
            found="none",
            fix="fit it from traces",
        )


def _missing(name: str) -> ArtifactError:
    return ArtifactError(
        "E_MISSING", name, expected="a file", found="none", fix="fetch the artifact again"
    )


def _extra(name: str) -> ArtifactError:
    return ArtifactError("E_EXTRA", "files", expected="only the files listed", found=name)
