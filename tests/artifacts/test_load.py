"""Loading: damage of every kind, names, kinds of folders, the order of the steps, what is cheap."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specctl.artifacts import Domain, load, load_artifact
from specctl.artifacts.strict_json import MAX_KEY_CHARS, parse_strict
from specctl.artifacts.tensors import MAX_NUMBERS, read_tensors, write_tensors
from specctl.errors import ArtifactError
from specctl.features import SUFFIX_TOKENS
from specctl.policy import FullTree, build_shape
from specctl.policy.growing import pool_capacity
from specctl.policy.scorers import MAX_CELLS, MAX_HIDDEN
from tests.artifacts import examples
from tests.artifacts.conftest import refused


@pytest.mark.parametrize(
    "name", ["nowhere", "file", "empty", "a\0b", "half \ud800 a pair"], ids=ascii
)
def test_what_is_no_folder_or_empty_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    refused("E_MISSING", load_artifact, tmp_path / name)


@pytest.mark.parametrize("call", ["listdir", "fdopen"])
def test_a_share_that_goes_away_while_it_is_read_is_a_refusal(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says so of a folder that was replaced on its server, and a disk of a bad sector."""

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, call, fail)
    assert os.strerror(errno.ESTALE) in str(refused("E_MISSING", load_artifact, folder))


KINDS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parent),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "file": lambda path: path.write_text("x"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".cache", ".gitattributes", ".git", ".gitignore"])
def test_nothing_else_beside_the_files_is_passed_over(name: str, kind: str, folder: Path) -> None:
    KINDS[kind](folder / name)
    if (name, kind) in ((".cache", "folder"), (".gitattributes", "file")):
        assert load_artifact(folder)
    else:
        refused("E_EXTRA", load_artifact, folder)


def test_another_artifact_than_the_one_asked_for_is_refused(folder: Path) -> None:
    refused("E_DIGEST", load_artifact, folder, digest=examples.sha("f"))


def test_another_k_is_another_feature(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.features.ENTROPY_TOP_K", 20)
    refused("E_FEATURES", load_artifact, folder)


def test_a_twin_is_listed_by_digest_and_never_read(folder: Path) -> None:
    policy = load_artifact(folder).policy
    (folder / "policy.onnx").write_bytes(b"no graph")
    refused("E_DIGEST", load_artifact, folder)
    examples.replace_file(folder, "policy.onnx", b"no graph")
    assert load_artifact(folder).policy == policy


def broken_files(folder: Path) -> Iterator[str]:
    """Breaks a sound folder for the loader's steps, the last one first; gives the step's code."""
    domain = Domain(hardware=("another",)).model_dump(mode="json")
    examples.write_manifest(folder, {**examples.read_manifest(folder), "domain": domain})
    tensors = read_tensors((folder / "policy.safetensors").read_bytes())
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("selftest.")}
    examples.replace_file(folder, "policy.safetensors", write_tensors(kept))
    yield "E_SELFTEST"
    examples.replace_file(folder, "report.json", b"{")
    yield "E_MANIFEST"
    examples.write_manifest(folder, {**examples.read_manifest(folder), "lossless": False})
    yield "E_CLASS"
    manifest = examples.read_manifest(folder)
    manifest["policy"]["shape"]["gammas"] = [0.5] * 9
    examples.write_manifest(folder, manifest)
    yield "E_POLICY"
    examples.replace_file(folder, "policy.safetensors", b"no tensors")
    yield "E_WEIGHTS"
    examples.write_manifest(folder, {**examples.read_manifest(folder), "features": ["phi"] * 33})
    yield "E_COST"
    pair = {**examples.read_manifest(folder)["pair"], "target_digest": examples.sha("9")}
    examples.write_manifest(folder, {**examples.read_manifest(folder), "pair": pair})
    yield "E_TARGET"
    (folder / "policy.onnx").write_bytes(b"unlisted")
    yield "E_DIGEST"
    examples.write_manifest(folder, {**examples.read_manifest(folder), "artifact_version": 99})
    yield "E_SCHEMA"
    (folder / "README.md").unlink()
    yield "E_MISSING"
    (folder / "model.pkl").write_bytes(b"")
    yield "E_EXTRA"


def test_the_first_step_that_fails_is_the_one_that_speaks(folder: Path) -> None:
    """Each fault is put on top of all that come later, and speaks for them with its own code."""
    for code in broken_files(folder):
        refused(code, load_artifact, folder, expect=examples.PAIR)


def test_estimates_of_cost_are_what_is_built() -> None:
    for shape in (FullTree(), FullTree(depth=3, top_k=4, width=2), FullTree(nested=False)):
        assert load.full_slots(shape) == pool_capacity(build_shape(shape)) < load.MAX_SLOTS
    assert (2 * SUFFIX_TOKENS + 2) * MAX_CELLS < MAX_NUMBERS
    assert (load.MAX_FEATURES + 2) * MAX_HIDDEN + 2 * load.MAX_FEATURES + 1 < MAX_NUMBERS


def test_keys_are_no_longer_than_names_and_named_where_they_are_twice() -> None:
    longest = "k" * MAX_KEY_CHARS
    assert parse_strict(f'{{"{longest}":1}}'.encode()) == {longest: 1}
    assert "256 characters" in str(
        refused("E_MANIFEST", parse_strict, f'{{"a":[{{"{longest}k":1}}]}}'.encode())
    )
    with pytest.raises(ArtifactError, match="'lossless' twice"):
        parse_strict(b'{"lossless":true,"lossless":false}')
