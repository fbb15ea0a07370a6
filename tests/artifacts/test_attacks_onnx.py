"""What `test_attacks` does not ask of twins: where they part, other bytes, none, one too many."""

from __future__ import annotations

from pathlib import Path

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
from tests.artifacts.hostile.onnx import FAMILIES


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
