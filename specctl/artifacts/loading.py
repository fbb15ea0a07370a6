"""The one loader: from bytes of strangers to a policy, or to a refusal at the first broken rule.

docs/artifact-format.md states the rules and why. There is no other way in, no fallback, and
nothing that could run code from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specctl.artifacts import checks
from specctl.artifacts.compatibility import Expected, check_expected
from specctl.artifacts.files import check_names, check_sizes, read_folder
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
from specctl.artifacts.tensors import Tensor, join_policy, read_tensors
from specctl.artifacts.text_warning import warn_of_text
from specctl.artifacts.twin_check import check_twin
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
class LoadRequest:
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

    Who signed the digest, and whether it is fresh, a registry asks before it fetches the files.

    Args:
        artifact: what a refusal calls it: a folder or a reference; None is its digest.
    """
    with refusals_of(artifact or _digest_in(contents)):
        return checked(contents, LoadRequest(expect, digest))


def _digest_in(contents: Mapping[str, bytes]) -> str | None:
    return digest_of(contents[MANIFEST]) if MANIFEST in contents else None


def checked(contents: Mapping[str, bytes], request: LoadRequest) -> Artifact:
    """Every step, in this process; the first that fails raises."""
    load = Load(contents, request)
    for _, step in STEPS:
        step(load)
    return Artifact(load.policy, load.manifest, load.digest)


class Load:
    """The files of an artifact, and what the steps have made of them so far."""

    manifest: Manifest
    tensors: Mapping[str, Tensor]
    policy: Policy
    report: Any = None

    def __init__(self, files: Mapping[str, bytes], request: LoadRequest) -> None:
        self.files, self.request = files, request

    @cached_property
    def digest(self) -> str:
        return digest_of(self.files[MANIFEST])


def _check_files(load: Load) -> None:
    check_sizes(load.files)
    checks.check_required(load.files)


def _read_manifest(load: Load) -> None:
    load.manifest = parse_manifest(load.files[MANIFEST])


def _read_tensors(load: Load) -> None:
    load.tensors = read_tensors(load.files[TENSORS])
    check_header(SELFTEST, load.files[SELFTEST])


def _read_policy(load: Load) -> None:
    load.policy = join_policy(load.manifest.policy, load.tensors)
    checks.check_features_read(load.manifest, load.policy)


def _read_report(load: Load) -> None:
    if REPORT_JSON in load.files:
        load.report = parse_strict(load.files[REPORT_JSON], REPORT_JSON)


def _check_texts(load: Load) -> None:
    card = load.files[CARD].decode("utf-8", "replace")
    check_private(load.manifest.model_dump(mode="json"), {CARD: card}, load.report)
    warn_of_text(CARD, card)


def _check_selftest(load: Load) -> None:
    check_selftest(load.policy, load.files[SELFTEST])


STEPS: tuple[tuple[str, Callable[[Load], None]], ...] = (
    ("names", lambda load: check_names(load.files)),
    ("files", _check_files),  # from here on the bytes are bounded, by name
    ("identity", lambda load: checks.check_identity(load.digest, load.request.digest)),
    ("manifest", _read_manifest),  # JSON: values, keys and levels
    ("digests", lambda load: checks.check_files(load.manifest, load.files)),
    ("pair", lambda load: check_expected(load.manifest, load.request.pair)),
    ("features", lambda load: checks.check_feature_digest(load.manifest)),  # 32
    ("tensors", _read_tensors),  # numpy: no more than the bytes
    ("policy", _read_policy),  # elements of each tensor, before they become Python's numbers
    ("class", lambda load: checks.check_class(load.manifest, load.policy)),
    ("cost", lambda load: check_cost(load.policy)),  # of whatever is built of the record
    ("report", _read_report),  # JSON, as of the manifest
    ("privacy", _check_texts),  # patterns times bytes of text
    ("twin", lambda load: check_twin(load.policy, load.files.get(TWIN))),
    ("self-test", _check_selftest),
)
"""The steps of docs/artifact-format.md, but for the two that a registry takes; each comment is
what bounds the work. What is cheap and bounds others comes first."""
