"""What `test_attacks` does not ask of names and files: every cut, every bit, no folder at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import load_artifact
from specctl.artifacts.files import MAX_BYTES, check_name, read_folder
from specctl.errors import ArtifactError
from tests.artifacts.attacks import checked, refused
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


@pytest.mark.parametrize("path", ["a\0b", "half \ud800 a pair"], ids=["NUL", "surrogate"])
def test_a_path_that_no_folder_can_have_is_refused(path: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        load_artifact(path)
    checked(caught.value, "E_MISSING")


@pytest.mark.parametrize("call", ["listdir", "fdopen"])
def test_a_share_that_goes_away_while_it_is_read_is_a_refusal(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says so of a folder that was replaced on its server, and a disk of a bad sector."""

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, call, fail)
    assert refused(folder, "E_MISSING").found == os.strerror(errno.ESTALE)


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


KINDS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parent),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "file": lambda path: path.write_text("x"),
    "folder": Path.mkdir,
}
PASSED_OVER = ((".cache", "folder"), (".gitattributes", "file"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".cache", ".gitattributes", ".git", ".gitignore"])
def test_nothing_else_beside_the_files_is_passed_over(name: str, kind: str, folder: Path) -> None:
    """A link of that name, a file where a folder belongs, and names that only look like them."""
    KINDS[kind](folder / name)
    if (name, kind) in PASSED_OVER:
        assert load_artifact(folder)
        return
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


def test_another_artifact_than_the_one_asked_for_is_refused(folder: Path) -> None:
    refused(folder, "E_DIGEST", digest=sha("f"))
