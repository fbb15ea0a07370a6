"""ONNX files that must not be loaded (notes/reliability.md, 3.3): refused before any library."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts.onnx_twin import twin_bytes
from specctl.artifacts.twin_check import check_twin
from specctl.errors import ArtifactError
from tests.artifacts.attacks import checked, refused
from tests.artifacts.examples import (
    POLICIES,
    read_manifest,
    replace_file,
    write_artifact,
    write_manifest,
)
from tests.artifacts.hostile_onnx import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_hostile_graph_is_refused_by_its_rule(name: str) -> None:
    make, code = FAMILIES[name]
    with pytest.raises(ArtifactError) as caught:
        check_twin(POLICIES["hetero"], make())
    checked(caught.value, code)


def test_the_first_difference_is_named() -> None:
    make, _ = FAMILIES["26 another weight"]
    with pytest.raises(ArtifactError, match=r"model\.graph\[0\]\.initializer\[1\]\.raw_data"):
        check_twin(POLICIES["hetero"], make())


def test_other_bytes_of_the_same_graph_are_refused() -> None:
    """Fields in another order, and a varint longer than need be: protobuf reads the same."""
    data = twin_bytes(POLICIES["hetero"])
    assert data is not None
    assert data[:2] == b"\x08\x08", "ir_version comes first"
    for other in (data[2:] + data[:2], b"\x08\x88\x00" + data[2:]):
        with pytest.raises(ArtifactError, match="canonical bytes") as caught:
            check_twin(POLICIES["hetero"], other)
        checked(caught.value, "E_ONNX_GRAPH")


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**6)
    return file.getvalue()


@pytest.mark.parametrize(
    "make",
    [lambda: pickle.dumps({}), _zip, lambda: gzip.compress(b"\0" * 10**6)],
    ids=["pickle", "pt", "joblib"],
)
@pytest.mark.parametrize("file", ["policy.onnx", "policy.safetensors", "selftest.safetensors"])
def test_formats_that_run_code_or_grow_are_refused(
    file: str, make: Callable[[], bytes], folder: Path
) -> None:
    replace_file(folder, file, make())
    refused(folder, "E_FORMAT")


def test_a_hostile_twin_reaches_no_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attacks = [(make(), code) for make, code in list(FAMILIES.values())[::5]]
    import onnx
    import onnxruntime

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("parsed")

    for name in ("load", "load_model", "load_from_string", "load_model_from_string"):
        monkeypatch.setattr(onnx, name, refuse)
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    for data, code in attacks:
        replace_file(folder, "policy.onnx", data)
        refused(folder, code)


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
