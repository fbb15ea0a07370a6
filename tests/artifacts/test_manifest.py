"""Manifests: every version that was ever written is read, and today's has one form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specctl.artifacts import Domain, Metric, Origin, load_artifact, save_artifact
from specctl.artifacts.installation import lock_digest, lock_lines, source_digest
from specctl.artifacts.manifest import (
    parse_manifest,
)
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json
from tests.artifacts.examples import DOMAIN, EVIDENCE, ORIGIN, PAIR, POLICIES, sha, write_artifact


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
        ("", {"artifact_version": 0}),
        ("", {"artifact_version": 2}),
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
