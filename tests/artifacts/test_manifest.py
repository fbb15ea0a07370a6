"""Manifests: every version that was ever written is read, and today's has one form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specctl.artifacts import Artifact, Domain, Metric, Origin, load_artifact, save_artifact
from specctl.artifacts.installation import lock_digest, lock_lines, source_digest
from specctl.artifacts.manifest import (
    ARTIFACT_VERSION,
    digest_of,
    manifest_bytes,
    parse_manifest,
)
from specctl.artifacts.verified import mark_verified
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json
from tests.artifacts.examples import DOMAIN, EVIDENCE, ORIGIN, PAIR, POLICIES, sha, write_artifact
from tests.artifacts.golden import GOLDEN

FOLDERS = sorted(path for path in GOLDEN.glob("artifacts-v*/*") if path.is_dir())


def load_ours(folder: Path) -> Artifact:
    """Loads a golden folder without the child process that judges a stranger's: it is ours."""
    mark_verified(digest_of((folder / "config.json").read_bytes()))
    return load_artifact(folder)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_any_version_wrote_is_read(folder: Path) -> None:
    """Its identity is that of its bytes, which its record gives back."""
    artifact, data = load_ours(folder), (folder / "config.json").read_bytes()
    assert manifest_bytes(artifact.manifest) == data
    assert artifact.digest == digest_of(data)
    assert f"artifacts-v{artifact.manifest.artifact_version}" == folder.parent.name


def test_there_are_golden_folders_of_every_kind_and_version() -> None:
    for version in (1, ARTIFACT_VERSION):
        names = {path.name for path in FOLDERS if path.parent.name == f"artifacts-v{version}"}
        assert names == POLICIES.keys()


def test_what_version_1_lacks_is_unknown() -> None:
    manifest = load_ours(GOLDEN / "artifacts-v1" / "hetero").manifest
    assert manifest.domain is None
    assert manifest.evidence is not None
    assert all(metric.level is None for metric in manifest.evidence.metrics.values())
    provenance = manifest.provenance
    assert (provenance.source_digest, provenance.git_commit, provenance.lock_digest) == (None,) * 3


def test_facts_come_back(tmp_path: Path) -> None:
    metrics = {"rate": Metric.of(2.5, 2.0, 3.0, num_prompts=40), "plain": Metric(value=1.0)}
    evidence = EVIDENCE.model_copy(update={"metrics": metrics})
    origin = Origin(PAIR, evidence, domain=DOMAIN, parent=sha("f"))
    save_artifact(tmp_path / "a", POLICIES["chain"], origin, card="# chain\n")
    found = load_artifact(tmp_path / "a").manifest
    assert (found.domain, found.evidence) == (DOMAIN, evidence)
    assert found.provenance.parent == sha("f")
    assert found.provenance.source_digest == source_digest()
    assert found.provenance.lock_digest == lock_digest()


def test_the_lock_names_what_the_package_depends_on_and_no_tool() -> None:
    names = {line.partition("==")[0] for line in lock_lines()}
    assert {"torch", "numpy", "pydantic", "typing-extensions"} <= names  # the last through others
    assert not names & {"specctl", "pytest", "mypy", "obstore", "moto"}
    assert lock_lines() == sorted(lock_lines())


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [(None, 1.0, 2.0), (1.0, None, 2.0), (1.0, float("nan"), 2.0), (float("nan"), 0.0, 1.0)],
)
def test_an_interval_without_its_ends_is_none(
    value: float | None, low: float | None, high: float | None
) -> None:
    found = Metric.of(value, low, high)
    assert (found.low, found.high, found.level, found.num_prompts) == (None,) * 4


@pytest.mark.parametrize(
    "fields",
    [{"low": 1.0}, {"low": 2.0, "high": 1.0, "level": 0.9}, {"level": 0.9}, {"level": 2.0}],
)
def test_a_metric_keeps_its_laws(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Metric(value=1.5, **fields)  # type: ignore[arg-type]


def written(tmp_path: Path) -> dict[str, Any]:
    folder = write_artifact(tmp_path / "a", "chain")
    tree: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return tree


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("provenance", {"source_digest": "sha256:x"}),
        ("provenance", {"git_commit": "HEAD"}),
        ("provenance", {"lock_digest": 1}),
        ("evidence", {"metrics": {"rate": 1.0}}),
        ("evidence", {"metrics": {"rate": {"value": 1.0}}}),
        ("evidence", {"metrics": {"a\u001b[2J": Metric(value=1.0).model_dump()}}),
        ("", {"domain": {"hardware": []}}),
        ("", {"domain": {**Domain().model_dump(), "batch_size": {"low": 2, "high": 1}}}),
        ("", {"domain": {**Domain().model_dump(), "workload": "\u0007"}}),
        ("", {"domain": {**Domain().model_dump(), "prompt": "hello"}}),
        ("", {"artifact_version": 1}),
        ("", {"artifact_version": 3}),
        ("", {"artifact_version": True}),
    ],
)
def test_other_fields_are_refused(tmp_path: Path, part: str, change: dict[str, Any]) -> None:
    tree = written(tmp_path)
    (tree[part] if part else tree).update(change)
    with pytest.raises(ArtifactError) as refusal:
        parse_manifest(canonical_json(tree).encode())
    assert refusal.value.code == "E_SCHEMA"


@pytest.mark.parametrize("field", ["domain", "pair", "files", "lossless"])
def test_a_field_left_out_is_not_null(tmp_path: Path, field: str) -> None:
    tree = written(tmp_path)
    del tree[field]
    with pytest.raises(ArtifactError, match="E_SCHEMA"):
        parse_manifest(canonical_json(tree).encode())


def test_one_manifest_has_one_text(tmp_path: Path) -> None:
    """A whole number in a float's place reads the same; its digest would be another."""
    tree = written(tmp_path)
    assert tree["evidence"]["metrics"]["held_out_mse"]["value"] == 0.25
    tree["evidence"]["metrics"]["held_out_mse"]["value"] = 3
    with pytest.raises(ArtifactError, match="another form"):
        parse_manifest(canonical_json(tree).encode())


def test_identity_does_not_depend_on_the_place(tmp_path: Path) -> None:
    first = save_artifact(tmp_path / "a", POLICIES["chain"], ORIGIN, card="# chain\n")
    assert save_artifact(tmp_path / "b", POLICIES["chain"], ORIGIN, card="# chain\n") == first
