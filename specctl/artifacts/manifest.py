"""`config.json`, the manifest of an artifact: strict, canonical, one version.

docs/artifact-format.md explains the fields. The policy is kept as plain JSON values, so that a
registry can list and move artifacts without torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, JsonValue, ValidationError, model_validator

from specctl.artifacts.strict_json import parse_strict
from specctl.errors import ArtifactError
from specctl.records import Record, canonical_json, describe_violation, require

ARTIFACT_VERSION = 1
MANIFEST, TENSORS, TWIN, CARD = "config.json", "policy.safetensors", "policy.onnx", "README.md"
REPORT_JSON = "report.json"
SIGNATURE = "signature.dsse.json"
"""Over the manifest, which therefore cannot list it."""

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,256}$")]
"""Text without control characters, which a terminal would interpret."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def _on_calendar(text: str) -> str:
    datetime.strptime(text, UTC_FORMAT)  # raises ValueError, which pydantic reports
    return text


UtcTime = Annotated[
    str,
    Field(pattern=r"^[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}Z$"),
    AfterValidator(_on_calendar),
]
"""A valid time; texts of fixed width sort by time."""


def utc_now() -> str:
    """The time as a `UtcTime`, e.g. `2026-01-31T12:00:00Z`."""
    return datetime.now(UTC).strftime(UTC_FORMAT)


def _without_controls(tree: JsonValue) -> JsonValue:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _without_controls(key)
            _without_controls(value)
    elif isinstance(tree, list):
        for value in tree:
            _without_controls(value)
    elif isinstance(tree, str):
        require(not _CONTROL.search(tree), f"no control characters, as in {tree[:64]!a}")
    return tree


Settings = Annotated[dict[str, JsonValue], AfterValidator(_without_controls)]
"""The configuration of a fit, without control characters, like a `Name`."""


class PairFingerprint(Record):
    """The models that a policy was fitted on, identified by their digests."""

    target_digest: Digest  # of configuration and weights
    drafter_digest: Digest  # likewise
    tokenizer_digest: Digest  # of the mapping from text to ids
    target: Name  # shown to people, never compared
    drafter: Name  # likewise


class Range(Record):
    """From `low` to `high`, both included."""

    low: Count
    high: Count

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(self.low <= self.high, "low must not be above high")
        return self

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


class Domain(Record):
    """The conditions under which evidence was gathered. Null is unknown; nothing is guessed."""

    target_config_digest: Digest | None = None  # of the model's `config.json` alone
    target_revision: Name | None = None  # commit of the hub, for a model that came from there
    drafter_config_digest: Digest | None = None  # likewise
    drafter_revision: Name | None = None  # likewise
    dtype: Name | None = None  # of the target, e.g. `bfloat16`
    hardware: Annotated[tuple[Name, ...], Field(min_length=1, max_length=64)] | None = None
    """Device names as reported; for measured times, the devices that they hold for."""
    batch_size: Range | None = None  # requests that shared a round
    context_tokens: Range | None = None  # length of the text at a round's start
    workload: Name | None = None  # kind of the prompts, named by the user, e.g. `chat`


class SplitSize(Record):
    """One side of a split."""

    num_prompts: Count  # none is on both sides
    num_rounds: Count  # of decoding


class Metric(Record):
    """A figure, with its two-sided interval where one was computed."""

    value: float | None  # null if the data do not define it
    low: float | None = None  # lower end of the interval
    high: float | None = None  # upper end
    level: Annotated[float, Field(gt=0, lt=1)] | None = None  # confidence of the interval
    num_prompts: Count | None = None  # behind the interval

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = [end is not None for end in (self.low, self.high, self.level)]
        require(all(known) or not any(known), "low, high and level go together")
        if self.low is not None and self.high is not None:
            require(self.low <= self.high, "low must not be above high")
        return self

    @classmethod
    def of(
        cls,
        value: float | None,
        low: float | None,
        high: float | None,
        *,
        level: float = 0.95,
        num_prompts: int | None = None,
    ) -> Metric:
        """A figure with its interval; None and NaN, of value or ends, are undefined."""
        ends = (value, low, high)
        value, low, high = (x if x is not None and isfinite(x) else None for x in ends)
        if value is None or low is None or high is None:
            return cls(value=value)
        return cls(value=value, low=low, high=high, level=level, num_prompts=num_prompts)


MARK_CHARS = 8
PromptMarks = Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")]


def prompt_marks(prompt_ids: Iterable[str], *more: str) -> str:
    """Short identifiers of prompts: the first four bytes of the SHA-256 of each id, in hex, sorted
    and joined, with the marks `more`. Among 4,000 marks, one other prompt in a million has one."""
    marks = {_mark(prompt_id) for prompt_id in prompt_ids}
    return "".join(sorted(marks.union(*map(_marks_in, more))))


def _mark(prompt_id: str) -> str:
    return hashlib.sha256(prompt_id.encode()).hexdigest()[:MARK_CHARS]


def _marks_in(text: str) -> Iterator[str]:
    return (text[at : at + MARK_CHARS] for at in range(0, len(text), MARK_CHARS))


class Evidence(Record):
    """The data behind a policy."""

    trace_digest: Digest  # of the snapshot of traces, which names every committed row of it
    num_prompts: Count  # of all splits
    num_rounds: Count  # of all splits
    splits: dict[Name, SplitSize]  # `train` and `held_out`
    metrics: dict[Name, Metric]  # figures by name
    fitted_on: PromptMarks  # of the prompts that the policy was fitted to or chosen on

    @classmethod
    def of_splits(
        cls,
        trace_digest: str,
        splits: dict[str, SplitSize],
        metrics: Mapping[str, Metric | float | None],
        fitted_on: str,
    ) -> Evidence:
        """Evidence with the totals of its splits; metrics may be plain numbers."""
        return cls(
            trace_digest=trace_digest,
            num_prompts=sum(size.num_prompts for size in splits.values()),
            num_rounds=sum(size.num_rounds for size in splits.values()),
            splits=splits,
            metrics={
                name: figure if isinstance(figure, Metric) else Metric(value=figure)
                for name, figure in metrics.items()
            },
            fitted_on=fitted_on,
        )

    def was_fitted_on(self, prompt_ids: Iterable[str]) -> set[str]:
        """The given prompts that the policy was fitted to or chosen on."""
        known = set(_marks_in(self.fitted_on))
        return {prompt_id for prompt_id in prompt_ids if _mark(prompt_id) in known}


class Provenance(Record):
    """The software that wrote an artifact, the time (UTC), and the artifact it descends from."""

    specctl_version: Name
    library_versions: dict[Name, Name]
    created: UtcTime
    parent: Digest | None
    source_digest: Digest | None = None  # of the package's own Python files, as installed


class FileEntry(Record):
    """Identity and size of one file of the folder."""

    digest: Digest
    size_bytes: Count

    @classmethod
    def of(cls, data: bytes) -> FileEntry:
        return cls(digest=digest_of(data), size_bytes=len(data))


class Manifest(Record):
    """All of `config.json`."""

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
    """The source of a policy, for the writer of its artifact."""

    pair: PairFingerprint  # the models that it is for
    evidence: Evidence | None = None  # None for a policy set by hand
    fit: dict[str, JsonValue] | None = None  # configuration of the fit; None likewise
    domain: Domain | None = None  # the conditions of the evidence
    parent: str | None = None  # digest of the artifact that it descends from
    created: str = field(default_factory=utc_now)  # a `UtcTime`

    def of_sets(self, snapshots: Sequence[str]) -> Origin:
        """Adds the snapshots of several sets to `fit`; one alone is `Evidence.trace_digest`."""
        if len(snapshots) < 2:
            return self
        return replace(self, fit={**(self.fit or {}), "snapshots": list(snapshots)})


def digest_of(data: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def manifest_bytes(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest; their digest is the artifact's identity."""
    return canonical_json(manifest.model_dump(mode="json")).encode()


def parse_manifest(data: bytes) -> Manifest:
    """The manifest of `config.json`.

    Raises:
        ArtifactError: E_MANIFEST for JSON that is ambiguous or not canonical, E_SCHEMA for
            another version or other fields.
    """
    tree: Any = parse_strict(data)
    version = tree.get("artifact_version") if isinstance(tree, dict) else None
    if type(version) is not int or version != ARTIFACT_VERSION:
        raise ArtifactError(
            "E_SCHEMA",
            f"{MANIFEST}, artifact_version",
            f"it is {repr(version)[:64]}, but this specctl reads version {ARTIFACT_VERSION}",
            hint="use the version of specctl that wrote it, or fit the policy again",
        )
    if canonical_json(tree).encode() != data:
        problem = "it is not canonical JSON (sorted keys, no white space)"
        raise ArtifactError("E_MANIFEST", MANIFEST, problem)
    try:
        manifest = Manifest.model_validate_json(data)
        problem = "fields are left out, or numbers are not canonical"
    except ValidationError as error:
        manifest, problem = None, describe_violation(error)
    # An omitted field reads as null, and 1 as 1.0; only one text may have the digest.
    if manifest is None or manifest_bytes(manifest) != data:
        raise ArtifactError("E_SCHEMA", MANIFEST, problem)
    return manifest
