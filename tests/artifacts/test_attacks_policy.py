"""Numbers and records that must not be loaded (notes/reliability.md, 3.3): one code, one line."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.artifacts.tensors import write_tensors
from tests.artifacts.attacks import refused
from tests.artifacts.examples import (
    HETERO,
    read_manifest,
    replace_file,
    write_artifact,
    write_manifest,
)


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
    "matrix": (edges_file([[0.1, 0.2]]), "E_WEIGHTS"),
    "scalar": (edges_file(0.1), "E_WEIGHTS"),
    "falling": (edges_file(EDGES[::-1]), "E_POLICY"),
    "equal": (edges_file([0.1, 0.1, 0.2]), "E_POLICY"),
    "no edges": (edges_file([]), "E_POLICY"),
    "too few bins": (edges_file([0.5]), "E_POLICY"),
    "other name": (write_tensors({"shape.edge": EDGES}), "E_WEIGHTS"),
    "one more": (write_tensors({"shape.edges": EDGES, "x": EDGES}), "E_WEIGHTS"),
    "none": (write_tensors({}), "E_WEIGHTS"),
    "other edges": (edges_file(EDGES + 1), "E_ONNX_GRAPH"),
    "pickle": (pickle.dumps({"shape.edges": [1.0]}), "E_FORMAT"),
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
