"""The one loader: from bytes of unknown origin to a policy, or a refusal by the first broken rule.

docs/artifact-format.md states the rules and their reasons. Every artifact passes through here, and
no code of a file is ever run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specctl.artifacts.compatibility import Expected, check_expected
from specctl.artifacts.files import (
    check_contents,
    check_list,
    check_name,
    check_size,
    missing_file,
    read_folder,
)
from specctl.artifacts.manifest import (
    CARD,
    MANIFEST,
    REPORT_JSON,
    TENSORS,
    Manifest,
    digest_of,
    parse_manifest,
)
from specctl.artifacts.selftest import PREFIX, check_selftest
from specctl.artifacts.strict_json import parse_strict
from specctl.artifacts.tensors import join_policy, read_tensors
from specctl.errors import ArtifactError, refusals_of, shown
from specctl.features import NODE_FEATURES, ROUND_FEATURES, features_digest
from specctl.policy import FullTree, Policy

REQUIRED_FILES = (MANIFEST, TENSORS, CARD)
MAX_FEATURES = 32
MAX_SLOTS = 1 << 15
"""Nodes that a round may draft: 8 levels of 64 expanded nodes with 64 children."""
UNPREDICTABLE = frozenset(
    {
        *("token_id", "drawn_token", "next_token", "bonus_token_id", "later_entropy"),
        *("node_match", "path_accepted", "verified", "expanded", "confidence_rank", "tcr"),
        *("num_accepted", "num_emitted", "fully_accepted", "target_logp"),
        *("target_rank", "target_top1_logit", "target_top2_logit", "target_ratio"),
        *("target_margin", "target_entropy"),
    }
)
"""Known only after the target drew a token or a later level was drafted. A policy that read one
of them would change the text."""


@dataclass(frozen=True)
class Artifact:
    """A policy that passed every check, with its manifest."""

    policy: Policy
    manifest: Manifest
    digest: str  # identity, `sha256:<hex>` of the manifest

    def __repr__(self) -> str:
        pair, kind = self.manifest.pair, "lossless" if self.policy.lossless else "lossy"
        names = f"{pair.target} + {pair.drafter}"
        return f"Artifact({self.policy.name!r}, {kind}, {names!r}, {self.digest[:19]})"


def load_artifact(
    folder: Path | str, *, expect: Expected | None = None, digest: str | None = None
) -> Artifact:
    """Reads an artifact, or refuses it by the first rule that it breaks.

    Args:
        expect: the pair that is about to run, or an `Expectation`; None to load without running.
        digest: the required identity.

    Raises:
        ArtifactError: its `code` is the rule of docs/artifact-format.md.
    """
    folder = Path(folder)
    return load_files(read_folder(folder), expect=expect, digest=digest, artifact=str(folder))


def load_files(
    contents: Mapping[str, bytes],
    *,
    expect: Expected | None = None,
    digest: str | None = None,
    artifact: str | None = None,
) -> Artifact:
    """`load_artifact` for files in memory.

    Each step bounds the work of the next: numbers are parsed once their count is known to be small.

    Args:
        artifact: its name in errors: a folder or a reference; None for its digest.
    """
    found = digest_of(contents[MANIFEST]) if MANIFEST in contents else None
    with refusals_of(artifact or found):
        for name, data in contents.items():
            check_name(name)
            check_size(name, len(data))
        for name in REQUIRED_FILES:
            if name not in contents:
                raise missing_file(name)
        assert found is not None
        if digest is not None and found != digest:
            raise ArtifactError("E_DIGEST", "digest", f"it is {found}, not {digest}")
        manifest = parse_manifest(contents[MANIFEST])
        check_list(manifest.files)
        check_contents(manifest.files, contents)
        check_expected(manifest, expect)
        wanted = checked_features_digest(manifest.features)
        if manifest.feature_digest != wanted:
            raise _other_features(f"their digest is {wanted}, not {manifest.feature_digest}")
        tensors = read_tensors(contents[TENSORS])
        selftest = {name: tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}
        policy = join_policy(manifest.policy, tensors)
        if policy.shape.reads != manifest.features:
            read, listed = _brief(policy.shape.reads), _brief(manifest.features)
            raise _other_features(f"the policy reads {read}, not {listed}")
        check_class(manifest, policy)
        check_cost(policy)
        if REPORT_JSON in contents:
            parse_strict(contents[REPORT_JSON], REPORT_JSON)
        check_selftest(policy, selftest)
        return Artifact(policy, manifest, found)


def checked_features_digest(names: tuple[str, ...]) -> str:
    """Digest of features (E_COST for too many; E_PREDICTABLE, E_FEATURES for unusable ones)."""
    _require("features", len(names), MAX_FEATURES)
    late = sorted(UNPREDICTABLE & set(names))
    if late:
        problem = f"{late} are known only after the target's tokens are drawn"
        raise ArtifactError("E_PREDICTABLE", "features", problem)
    known = NODE_FEATURES.keys() | ROUND_FEATURES.keys()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise _other_features(f"{_brief(unknown)} are none of {sorted(known)}")
    return features_digest(names)


def _brief(names: Iterable[str]) -> str:
    return shown(", ".join(names), max_chars=200)


def _other_features(problem: str) -> ArtifactError:
    fix = "fit the policy again with this version of specctl"
    return ArtifactError("E_FEATURES", "features", problem, hint=fix)


def check_class(manifest: Manifest, policy: Policy) -> None:
    """Refuses a false `lossless`, and a lossy policy without evidence (E_CLASS)."""
    if manifest.lossless != policy.lossless:
        problem = f"it is {manifest.lossless}, but the acceptance is {policy.acceptance.kind}"
        raise ArtifactError("E_CLASS", "lossless flag", problem)
    if not policy.lossless and manifest.evidence is None:
        problem = "a lossy policy needs evidence of its cost"
        raise ArtifactError("E_CLASS", "evidence", problem, hint="fit it from traces")


def check_cost(policy: Policy) -> None:
    """Refuses a record that would take too much memory or time to build or to run (E_COST).

    A record bounds each of its numbers, but drafts grow with their product.
    """
    shape = policy.shape
    if isinstance(shape, FullTree):
        _require("policy record, drafted nodes", full_slots(shape), MAX_SLOTS)


def full_slots(shape: FullTree) -> int:
    """Most nodes that a full tree drafts, root included, as `policy.full` sizes its rule."""
    width = (shape.width or shape.top_k) + shape.nested * shape.top_k * (shape.top_k + 1) // 2
    return 1 + shape.top_k + (shape.depth - 1) * width * shape.top_k


def _require(field: str, found: int, most: int) -> None:
    if found > most:
        raise ArtifactError("E_COST", field, f"{found}, more than {most}")
