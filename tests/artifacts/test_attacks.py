"""Artifacts that must not be loaded (notes/reliability.md, 3.3): one code, one line, exit 3."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.artifacts import PairFingerprint, load_artifact
from specctl.artifacts.files import MAX_BYTES, check_name
from specctl.artifacts.manifest import parse_manifest
from specctl.artifacts.tensors import write_tensors
from specctl.errors import ArtifactError
from specctl.policy.parse import canonical_json
from tests.artifacts.examples import (
    HETERO,
    PAIR,
    POLICIES,
    read_manifest,
    replace_file,
    sha,
    write_artifact,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "artifact")


def refused(folder: Path, code: str, **options: Any) -> ArtifactError:
    """Asserts that loading stops with one line of this code, and returns it."""
    with pytest.raises(ArtifactError) as caught:
        load_artifact(folder, **options)
    assert caught.value.code == code, str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500
    return caught.value


# ------------------------------------------------------------------ names and files

NAMES = {
    "../../x": "E_PATH",
    "/abs": "E_PATH",
    "C:\\x": "E_PATH",
    "a\\..\\..\\b": "E_PATH",
    "%2e%2e%2f": "E_PATH",
    "%252e": "E_PATH",
    "a\x00b": "E_PATH",
    "a\nb": "E_PATH",
    ".": "E_PATH",
    "..": "E_PATH",
    "": "E_PATH",
    "a" * 256: "E_PATH",
    "CON": "E_PATH",
    "con.json": "E_PATH",
    "Config.json": "E_NAME",
    "polic\u0443.onnx": "E_NAME",
    "re\u0301port.json": "E_NAME",
    "\u202egnp.onnx": "E_NAME",
    "policy\u200b.onnx": "E_NAME",
    "model.pkl": "E_EXTRA",
    "policy.joblib": "E_EXTRA",
}


@pytest.mark.parametrize(("name", "code"), NAMES.items(), ids=[ascii(name)[:20] for name in NAMES])
def test_name_is_refused(name: str, code: str, folder: Path) -> None:
    with pytest.raises(ArtifactError, match=code):
        check_name(name)
    manifest = read_manifest(folder)
    manifest["files"][name] = manifest["files"]["policy.onnx"]
    write_manifest(folder, manifest)
    refused(folder, code)


@pytest.mark.parametrize("name", MAX_BYTES)
def test_every_name_of_the_format_is_allowed(name: str) -> None:
    check_name(name)


def test_absent_folder_and_plain_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "nowhere", "E_MISSING")
    refused(tmp_path / "file", "E_MISSING")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "E_MISSING")


def _symlink(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def _hard_link(path: Path, outside: Path) -> None:
    os.link(outside, path)


def _fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, outside: Path) -> None:
    path.mkdir()


def _socket(path: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket may have only 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("make", [_symlink, _hard_link, _fifo, _folder, _socket])
def test_what_is_not_a_plain_file_is_refused(
    make: Callable[[Path, Path], None], folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (folder / "policy.onnx").rename(outside)
    make(folder / "policy.onnx", outside)
    refused(folder, "E_FILETYPE")


def test_a_dangling_link_is_a_link(folder: Path) -> None:
    (folder / "report.png").symlink_to("nowhere")
    refused(folder, "E_FILETYPE")


def test_endless_file_is_not_read_beyond_its_cap(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(10 << 30)  # sparse: 10 GiB declared, nothing stored
    refused(folder, "E_SIZE")


@pytest.mark.parametrize("name", ["config.json", "policy.safetensors", "policy.onnx", "README.md"])
def test_missing_file_is_refused(name: str, folder: Path) -> None:
    (folder / name).unlink()
    refused(folder, "E_MISSING")


@pytest.mark.parametrize("name", ["policy.pkl", "report.png"])
def test_unlisted_file_is_refused(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b"x")
    refused(folder, "E_EXTRA")


@pytest.mark.parametrize("name", ["policy.safetensors", "policy.onnx", "README.md"])
def test_truncated_extended_or_flipped_payload_is_refused(name: str, folder: Path) -> None:
    data = (folder / name).read_bytes()
    cuts = [data[: len(data) * part // 16] for part in range(16)]
    flips = [
        data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        for bit, at in enumerate(range(0, len(data), max(1, len(data) // 7)))
        if bit < 8
    ]
    for damaged in (*cuts, *flips, data + b"\x00"):
        (folder / name).write_bytes(damaged)
        refused(folder, "E_DIGEST")


def test_truncated_manifest_is_refused(folder: Path) -> None:
    data = (folder / "config.json").read_bytes()
    for part in range(16):
        (folder / "config.json").write_bytes(data[: len(data) * part // 16])
        refused(folder, "E_MANIFEST")


def test_every_flipped_byte_of_the_manifest_changes_the_identity(folder: Path) -> None:
    data, digest = (folder / "config.json").read_bytes(), load_artifact(folder).digest
    for at in range(0, len(data), 29):
        (folder / "config.json").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ArtifactError):
            load_artifact(folder, digest=digest)


def test_files_of_two_versions_do_not_mix(folder: Path, tmp_path: Path) -> None:
    other = write_artifact(tmp_path / "other", "echo")
    (folder / "policy.safetensors").write_bytes((other / "policy.safetensors").read_bytes())
    refused(folder, "E_DIGEST")


def test_another_artifact_than_the_one_asked_for_is_refused(folder: Path) -> None:
    refused(folder, "E_DIGEST", digest=sha("f"))


# ------------------------------------------------------------------ manifest

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


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None, [1]], ids=repr)
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
    replace_file(folder, "policy.safetensors", write_tensors({"shape.edges": EDGES}))
    manifest = read_manifest(folder)
    manifest["policy"]["\x1b[2J"] = {"$tensor": "x"}
    write_manifest(folder, manifest)
    assert str(refused(folder, "E_WEIGHTS")).isprintable()


def test_the_manifest_may_not_list_itself(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["files"]["config.json"] = manifest["files"]["README.md"]
    write_manifest(folder, manifest)
    refused(folder, "E_EXTRA")


# ------------------------------------------------------------------ compatibility


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


# ------------------------------------------------------------------ tensors and policy


def edges_file(values: Any, dtype: Any = np.float32) -> bytes:
    return write_tensors({"shape.edges": np.asarray(values, dtype=dtype)})


EDGES = np.float32(HETERO.edges)
BAD_TENSORS = {
    "NaN": (edges_file([0.1, np.nan, 2]), "E_WEIGHTS"),
    "infinite": (edges_file([0.1, np.inf]), "E_WEIGHTS"),
    "1e38": (edges_file([0.1, 1e38]), "E_WEIGHTS"),
    "denormal": (edges_file([1e-40, 1.0]), "E_WEIGHTS"),
    "float16": (edges_file(EDGES, np.float16), "E_WEIGHTS"),
    "needless float64": (edges_file(EDGES, np.float64), "E_WEIGHTS"),
    "float64 that floors": (edges_file([0.1, 0.2], np.float64), "E_WEIGHTS"),
    "whole numbers": (edges_file([1, 2, 3], np.int64), "E_WEIGHTS"),
    "matrix": (edges_file([[0.1, 0.2]]), "E_POLICY"),
    "scalar": (edges_file(0.1), "E_POLICY"),
    "falling": (edges_file(EDGES[::-1]), "E_POLICY"),
    "equal": (edges_file([0.1, 0.1, 0.2]), "E_POLICY"),
    "no edges": (edges_file([]), "E_POLICY"),
    "too few bins": (edges_file([0.5]), "E_POLICY"),
    "other name": (write_tensors({"shape.edge": EDGES}), "E_WEIGHTS"),
    "one more": (write_tensors({"shape.edges": EDGES, "x": EDGES}), "E_WEIGHTS"),
    "none": (write_tensors({}), "E_WEIGHTS"),
    "other edges": (edges_file(EDGES + 1), "E_ONNX_GRAPH"),
    "pickle": (pickle.dumps({"shape.edges": [1.0]}), "E_WEIGHTS"),
    "empty": (b"", "E_WEIGHTS"),
    "endless header": (b"\xff" * 8 + b"{}", "E_WEIGHTS"),
    "trailing": (edges_file(EDGES) + b"x", "E_WEIGHTS"),
}


@pytest.mark.parametrize(("data", "code"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_bad_tensors_are_refused(data: bytes, code: str, folder: Path) -> None:
    replace_file(folder, "policy.safetensors", data)
    refused(folder, code)


BAD_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "literal edges": ({"edges": [0.1, 1.3, 2.7]}, "E_WEIGHTS"),
    "reference elsewhere": ({"edges": {"$tensor": "shape.gammas"}}, "E_WEIGHTS"),
    "reference with more": ({"edges": {"$tensor": "shape.edges", "x": 1}}, "E_WEIGHTS"),
    "reference to nothing": ({"gammas": {"$tensor": "shape.gammas"}}, "E_WEIGHTS"),
    "reference in a list": ({"gammas": [{"$tensor": "shape.edges"}]}, "E_POLICY"),
    "unknown kind": ({"kind": "oracle"}, "E_POLICY"),
    "unknown field": ({"hook": "os.system"}, "E_POLICY"),
    "absurd depth": ({"alpha": 64}, "E_POLICY"),
    "negative gamma": ({"gammas": [-1.0]}, "E_POLICY"),
    "text for a number": ({"index_base": "0"}, "E_POLICY"),
    "other plan than the twin": ({"cap_tokens": True}, "E_ONNX_GRAPH"),
}


@pytest.mark.parametrize(("changes", "code"), BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_bad_record_is_refused(changes: dict[str, Any], code: str, folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest["policy"]["shape"].update(changes)
    write_manifest(folder, manifest)
    refused(folder, code)


def test_lossy_acceptance_may_not_call_itself_lossless(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a", "mars")
    manifest = read_manifest(folder)
    write_manifest(folder, {**manifest, "lossless": True})
    refused(folder, "E_CLASS")
    write_manifest(folder, {**manifest, "evidence": None})
    refused(folder, "E_CLASS")


def test_lossless_acceptance_may_not_call_itself_lossy(folder: Path) -> None:
    write_manifest(folder, {**read_manifest(folder), "lossless": False})
    refused(folder, "E_CLASS")


@pytest.mark.parametrize("data", [pickle.dumps({}), b"", b"\x08\x08" * 100])
def test_what_is_not_the_twin_is_refused_unparsed(
    data: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("parsed")

    for name in ("load", "load_model", "load_from_string", "load_model_from_string"):
        monkeypatch.setattr(onnx, name, refuse)
    replace_file(folder, "policy.onnx", data)
    refused(folder, "E_ONNX_GRAPH")


def test_a_missing_twin_that_the_manifest_does_not_list_is_refused(folder: Path) -> None:
    (folder / "policy.onnx").unlink()
    manifest = read_manifest(folder)
    del manifest["files"]["policy.onnx"]
    write_manifest(folder, manifest)
    refused(folder, "E_ONNX_GRAPH")


def test_a_twin_where_none_belongs_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_artifact(tmp_path / "other", "eagle2")
    replace_file(other, "policy.onnx", (folder / "policy.onnx").read_bytes())
    refused(other, "E_ONNX_GRAPH")


def test_examples_of_json_in_this_file_are_what_they_say() -> None:
    assert json.loads(AMBIGUOUS["depth 33"])["artifact_version"] == 1
