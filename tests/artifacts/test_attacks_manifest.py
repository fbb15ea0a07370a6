"""Manifests that must not be loaded (notes/reliability.md, 3.3): one code, one line, exit 3."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.artifacts import PairFingerprint, load_artifact, save_artifact
from specctl.artifacts.manifest import parse_manifest
from specctl.artifacts.tensors import write_tensors
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json
from tests.artifacts.attacks import refused
from tests.artifacts.examples import (
    ORIGIN,
    PAIR,
    POLICIES,
    read_manifest,
    replace_file,
    sha,
    write_manifest,
)
from tests.artifacts.golden import GOLDEN

AMBIGUOUS = {
    "duplicate key": b'{"artifact_version":1,"lossless":true,"lossless":false}',
    "nested duplicate": b'{"artifact_version":1,"pair":{"target":"a","target":"b"}}',
    "NaN": b'{"artifact_version":1,"x":NaN}',
    "infinity": b'{"artifact_version":1,"x":-Infinity}',
    "1e999": b'{"artifact_version":1,"x":1e999}',
    "huge int": b'{"artifact_version":1,"x":' + b"9" * 5000 + b"}",
    "65 bit": b'{"artifact_version":1,"x":9223372036854775808}',
    "depth 10^4": b'{"artifact_version":1,"x":' + b"[" * 10**4 + b"]" * 10**4 + b"}",
    "depth 33": b'{"artifact_version":1,"x":' + b"[" * 33 + b"]" * 33 + b"}",
    "depth 10^5": b"[" * 10**5,
    "10^5 keys": canonical_json({f"k{i}": 0 for i in range(10**5)}).encode(),
    "not UTF-8": b'{"artifact_version":1,"x":"\xff"}',
    "byte order mark": b'\xef\xbb\xbf{"artifact_version":1}',
    "white space": b'{"artifact_version": 1}',
    "trailing newline": b'{"artifact_version":1}\n',
    "unsorted": b'{"artifact_version":1,"b":1,"a":1}',
    "trailing text": b'{"artifact_version":1}{}',
    "empty": b"",
}


@pytest.mark.parametrize("data", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_json_that_two_parsers_could_read_differently_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="E_MANIFEST") as caught:
        parse_manifest(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_duplicate_key_is_named() -> None:
    with pytest.raises(ArtifactError, match="'lossless' twice"):
        parse_manifest(AMBIGUOUS["duplicate key"])


@pytest.mark.parametrize("version", [0, 3, "1", 1.0, True, None, [1]], ids=repr)
def test_unknown_version_is_refused(version: Any, folder: Path) -> None:
    write_manifest(folder, {**read_manifest(folder), "artifact_version": version})
    refused(folder, "E_SCHEMA")


@pytest.mark.parametrize("data", [b"[]", b"null", b"1", b'"x"', b"{}"])
def test_a_manifest_that_is_not_one_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="E_SCHEMA"):
        parse_manifest(data)


def test_every_field_is_required_and_no_other_is_allowed(folder: Path) -> None:
    manifest = read_manifest(folder)
    for field in manifest:
        write_manifest(folder, {k: v for k, v in manifest.items() if k != field})
        refused(folder, "E_SCHEMA")
    write_manifest(folder, {**manifest, "trust_me": True})
    refused(folder, "E_SCHEMA")


def test_names_may_not_carry_terminal_escapes(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["pair"]["target"] = "\x1b[2Jinnocent"
    write_manifest(folder, manifest)
    refused(folder, "E_SCHEMA")


@pytest.mark.parametrize(
    "fit", [{"\x1b[2J": 1}, {"note": "a\x00b"}, {"deep": [{"x": ["y\x9b"]}]}], ids=ascii
)
def test_settings_of_a_fit_hold_no_control_characters(
    fit: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    write_manifest(folder, {**read_manifest(folder), "fit": {"kind": "cart", **fit}})
    assert "fit" in str(refused(folder, "E_SCHEMA"))
    old = Path(shutil.copytree(GOLDEN / "artifacts-v1" / "hetero", tmp_path / "v1"))
    write_manifest(old, {**read_manifest(old), "fit": fit})
    assert "fit" in str(refused(old, "E_SCHEMA"))
    with pytest.raises(ArtifactError, match=f"E_SCHEMA config.json of {tmp_path}/new: .*control"):
        save_artifact(tmp_path / "new", POLICIES["ar"], replace(ORIGIN, fit=fit), card="# a\n")
    assert not (tmp_path / "new").exists()


def test_a_refusal_shows_no_terminal_escapes(folder: Path) -> None:
    manifest = read_manifest(folder)
    for name in ("\x1b[2Jgone", "half \ud800 a pair", "two\nlines"):
        write_manifest(folder, {**manifest, name: 1})
        assert str(refused(folder, "E_SCHEMA")).isprintable()
        write_manifest(folder, {**manifest, "policy": {**manifest["policy"], name: 1}})
        error = refused(folder, "E_SCHEMA" if "half" in name else "E_POLICY")
        assert str(error).isprintable()
        write_manifest(folder, {**manifest, "files": {**manifest["files"], name: 1}})
        assert str(refused(folder, "E_SCHEMA")).isprintable()


def test_a_refused_tensor_name_shows_no_terminal_escapes(folder: Path) -> None:
    replace_file(folder, "policy.safetensors", write_tensors({"\x1b[2J": np.float32([np.nan])}))
    assert str(refused(folder, "E_WEIGHTS")).isprintable()
    replace_file(folder, "policy.safetensors", write_tensors({"shape.edges": np.float32([0.1])}))
    manifest = read_manifest(folder)
    manifest["policy"]["\x1b[2J"] = {"$tensor": "x"}
    write_manifest(folder, manifest)
    assert str(refused(folder, "E_WEIGHTS")).isprintable()


def test_the_manifest_may_not_list_itself(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["files"]["config.json"] = manifest["files"]["README.md"]
    write_manifest(folder, manifest)
    refused(folder, "E_EXTRA")


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


@pytest.mark.parametrize(
    "changes",
    [
        {"feature_digest": sha("e")},
        {"features": ["depth"]},
        {"features": ["phi", "phi"]},
        {"features": ["lucky_guess"]},
        {"features": []},
    ],
    ids=["units", "renamed", "twice", "unknown", "none"],
)
def test_other_features_are_refused(changes: dict[str, Any], folder: Path) -> None:
    write_manifest(folder, {**read_manifest(folder), **changes})
    refused(folder, "E_FEATURES")


def test_another_k_is_another_feature(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.features.ENTROPY_TOP_K", 20)
    refused(folder, "E_FEATURES")


def test_registered_features_that_the_policy_does_not_read_are_refused(folder: Path) -> None:
    from specctl.features import features_digest

    changes = {"features": ["depth"], "feature_digest": features_digest(["depth"])}
    write_manifest(folder, {**read_manifest(folder), **changes})
    refused(folder, "E_FEATURES")


def test_examples_of_json_in_this_file_are_what_they_say() -> None:
    assert json.loads(AMBIGUOUS["depth 33"])["artifact_version"] == 1
