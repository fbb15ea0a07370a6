"""What `test_attacks` does not ask of manifests: words of refusals, versions, another K."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import PairFingerprint, load_artifact, save_artifact
from specctl.artifacts.manifest import parse_manifest
from specctl.errors import ArtifactError
from tests.artifacts.attacks import refused
from tests.artifacts.examples import (
    ORIGIN,
    PAIR,
    POLICIES,
    read_manifest,
    sha,
    write_manifest,
)
from tests.artifacts.hostile.manifests import AMBIGUOUS


def test_a_duplicate_key_is_named() -> None:
    with pytest.raises(ArtifactError, match="'lossless' twice"):
        parse_manifest(AMBIGUOUS["duplicate key"])


@pytest.mark.parametrize(
    "fit", [{"\x1b[2J": 1}, {"note": "a\x00b"}, {"deep": [{"x": ["y\x9b"]}]}], ids=ascii
)
def test_settings_of_a_fit_hold_no_control_characters(
    fit: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    write_manifest(folder, {**read_manifest(folder), "fit": {"kind": "cart", **fit}})
    assert "fit" in str(refused(folder, "E_SCHEMA"))
    with pytest.raises(ArtifactError, match=f"E_SCHEMA config.json of {tmp_path}/new: .*control"):
        save_artifact(tmp_path / "new", POLICIES["ar"], replace(ORIGIN, fit=fit), card="# a\n")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("part", "code"),
    [("tokenizer", "E_TOKENIZER"), ("target", "E_TARGET"), ("drafter", "E_TARGET")],
)
def test_another_pair_is_refused(part: str, code: str, folder: Path) -> None:
    expect = PAIR.model_copy(update={f"{part}_digest": sha("e")})
    error = refused(folder, code, expect=expect)
    assert part in str(error)
    assert "toy target" in str(error)


def test_names_of_models_are_not_compared(folder: Path) -> None:
    renamed = PairFingerprint(**{**PAIR.model_dump(), "target": "elsewhere", "drafter": "copy"})
    assert load_artifact(folder, expect=renamed).policy == POLICIES["hetero"]


def test_another_k_is_another_feature(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.features.ENTROPY_TOP_K", 20)
    refused(folder, "E_FEATURES")


def test_examples_of_json_in_this_file_are_what_they_say() -> None:
    assert json.loads(AMBIGUOUS["depth 33"])["artifact_version"] == 1
