"""Names and files that must not be loaded (notes/reliability.md, 3.3): one code, one line."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import load_artifact
from specctl.artifacts.files import MAX_BYTES, check_name, read_folder
from specctl.errors import ArtifactError
from tests.artifacts.attacks import refused
from tests.artifacts.examples import read_manifest, sha, write_artifact, write_manifest

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


def _file(path: Path, outside: Path) -> None:
    path.write_text("x")


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


def test_what_the_hub_leaves_in_a_folder_is_passed_over(folder: Path) -> None:
    """`hf download --local-dir` makes a folder of its own there; repositories have attributes."""
    local_folder = pytest.importorskip("huggingface_hub._local_folder")
    digest = load_artifact(folder).digest
    for name in MAX_BYTES:
        if (folder / name).exists():
            paths = local_folder.get_local_download_paths(folder, name)
            paths.metadata_path.write_text("0123456789\netag\n0.0\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    assert (folder / ".cache" / "huggingface").is_dir()
    assert load_artifact(folder).digest == digest


def test_what_the_hub_leaves_is_never_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".cache").mkdir()
    (folder / ".gitattributes").write_text("x")
    opened: list[str] = []
    really = os.open

    def note(path: Any, *options: Any, **named: Any) -> int:
        opened.append(os.fspath(path))
        return really(path, *options, **named)

    monkeypatch.setattr(os, "open", note)
    assert ".cache" not in read_folder(folder)
    assert "config.json" in opened
    assert not [path for path in opened if ".cache" in path or ".gitattributes" in path]


@pytest.mark.parametrize("make", [_symlink, _fifo, _file, _folder])
@pytest.mark.parametrize("name", [".cache", ".gitattributes", ".git", ".gitignore"])
def test_nothing_else_beside_the_files_is_passed_over(
    name: str, make: Callable[[Path, Path], None], folder: Path, tmp_path: Path
) -> None:
    """A link of that name, a file where a folder belongs, and names that only look like them."""
    if (name, make) in [(".cache", _folder), (".gitattributes", _file)]:
        return
    (tmp_path / "outside").mkdir()
    make(folder / name, tmp_path / "outside")
    refused(folder, "E_EXTRA")


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
