"""What `test_attacks` does not ask of names and files: every cut, every bit, no folder at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.artifacts import load_artifact
from specctl.artifacts.files import MAX_BYTES, check_name
from specctl.errors import ArtifactError
from tests.artifacts.attacks import refused
from tests.artifacts.examples import sha
from tests.artifacts.hostile.files import NAMES


@pytest.mark.parametrize(("name", "code"), NAMES.items(), ids=[ascii(name)[:20] for name in NAMES])
def test_name_is_refused(name: str, code: str) -> None:
    with pytest.raises(ArtifactError, match=code):
        check_name(name)


@pytest.mark.parametrize("name", MAX_BYTES)
def test_every_name_of_the_format_is_allowed(name: str) -> None:
    check_name(name)


def test_absent_folder_and_plain_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "nowhere", "E_MISSING")
    refused(tmp_path / "file", "E_MISSING")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "E_MISSING")


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


def test_another_artifact_than_the_one_asked_for_is_refused(folder: Path) -> None:
    refused(folder, "E_DIGEST", digest=sha("f"))
