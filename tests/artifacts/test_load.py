"""Loading: damage of every kind, names, kinds of folders, the order of the steps, what is cheap."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl.artifacts import Domain, load, load_artifact
from specctl.artifacts.files import MAX_BYTES, check_is_artifact, kind_of
from specctl.artifacts.strict_json import MAX_KEY_CHARS, MAX_VALUES, most_values, parse_strict
from specctl.artifacts.tensors import MAX_NUMBERS, read_tensors, write_tensors
from specctl.errors import ArtifactError
from specctl.features import SUFFIX_TOKENS
from specctl.policy import FullTree, build_shape
from specctl.policy.growing import pool_capacity
from specctl.policy.scorers import MAX_CELLS, MAX_HIDDEN
from tests.artifacts import examples
from tests.artifacts.conftest import refused

FORMAT = Path(__file__).parents[2] / "docs" / "artifact-format.md"


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


def test_what_the_hub_leaves_is_never_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hf download --local-dir` makes a folder of its own there; repositories have attributes."""
    local_folder = pytest.importorskip("huggingface_hub._local_folder")
    digest = load_artifact(folder).digest
    for name in MAX_BYTES:
        if (folder / name).exists():
            paths = local_folder.get_local_download_paths(folder, name)
            paths.metadata_path.write_text("0123456789\netag\n0.0\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    assert (folder / ".cache" / "huggingface").is_dir()
    opened: list[str] = []
    really = os.open

    def note(path: Any, *options: Any, **named: Any) -> int:
        opened.append(os.fspath(path))
        return really(path, *options, **named)

    monkeypatch.setattr(os, "open", note)
    assert load_artifact(folder).digest == digest
    assert "config.json" in opened
    assert not [path for path in opened if ".cache" in path or ".gitattributes" in path]


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


def test_a_folder_of_another_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.json").touch()
    with pytest.raises(ArtifactError, match="a trace set"):
        check_is_artifact(tmp_path)
    assert kind_of(["b", "a"]) == "a folder with 'a' and 1 more"

    def closed(_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", closed)
    check_is_artifact(tmp_path)  # left to the loader, which has typed errors for that


def test_every_change_of_the_manifest_is_refused_or_another_identity(folder: Path) -> None:
    data, digest = (folder / "config.json").read_bytes(), load_artifact(folder).digest
    for at in range(0, len(data), 29):
        (folder / "config.json").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ArtifactError):
            load_artifact(folder, digest=digest)


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


def documented() -> list[tuple[str, set[str]]]:
    """Name and codes of each step of the format's table."""
    table = FORMAT.read_text().split("| step |")[1].split("\n\n")[0]
    steps: list[tuple[str, set[str]]] = []
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0]:
            number, _, name = cells[0].partition(" ")
            steps.append((name, set()))
            assert int(number) == len(steps)
        steps[-1][1].update(re.findall(r"`([EW]_\w+)`", cells[2]))
    return steps


def broken_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Breaks a sound folder step by step, the last one first; gives the step and its code."""
    domain = Domain(hardware=("another",)).model_dump(mode="json")
    examples.write_manifest(folder, {**examples.read_manifest(folder), "domain": domain})
    tensors = read_tensors((folder / "policy.safetensors").read_bytes())
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("selftest.")}
    examples.replace_file(folder, "policy.safetensors", write_tensors(kept))
    yield "self-test", "E_SELFTEST"
    examples.replace_file(folder, "report.json", b"{")
    yield "report", "E_MANIFEST"
    examples.write_manifest(folder, {**examples.read_manifest(folder), "lossless": False})
    yield "class", "E_CLASS"
    manifest = examples.read_manifest(folder)
    manifest["policy"]["shape"]["gammas"] = [0.5] * 9
    examples.write_manifest(folder, manifest)
    yield "policy", "E_POLICY"
    examples.replace_file(folder, "policy.safetensors", b"no tensors")
    yield "tensors", "E_WEIGHTS"
    examples.write_manifest(folder, {**examples.read_manifest(folder), "features": ["phi"] * 33})
    yield "features", "E_COST"
    pair = {**examples.read_manifest(folder)["pair"], "target_digest": examples.sha("9")}
    examples.write_manifest(folder, {**examples.read_manifest(folder), "pair": pair})
    yield "pair", "E_TARGET"
    (folder / "policy.onnx").write_bytes(b"unlisted")
    yield "digests", "E_DIGEST"
    examples.write_manifest(folder, {**examples.read_manifest(folder), "artifact_version": 99})
    yield "manifest", "E_SCHEMA"
    (folder / "README.md").unlink()
    yield "files", "E_MISSING"
    (folder / "model.pkl").write_bytes(b"")
    yield "names", "E_EXTRA"


def test_the_first_step_that_fails_is_the_one_that_speaks(folder: Path) -> None:
    """Each fault is put on top of all that come later, and speaks for them with its own code."""
    codes, order = dict(documented()), [name for name, _ in documented()]
    seen = []
    for step, code in broken_files(folder):
        refused(code, load_artifact, folder, expect=examples.PAIR)
        assert code in codes[step]
        seen.append(step)
    assert seen == sorted(seen, key=order.index, reverse=True)
    of_others = {"identity", "signature", "cost"}  # tested in places of their own
    assert set(seen) | of_others == set(order)


def test_estimates_of_cost_are_what_is_built() -> None:
    for shape in (FullTree(), FullTree(depth=3, top_k=4, width=2), FullTree(nested=False)):
        assert load.full_slots(shape) == pool_capacity(build_shape(shape)) < load.MAX_SLOTS
    assert (2 * SUFFIX_TOKENS + 2) * MAX_CELLS < MAX_NUMBERS
    assert (load.MAX_FEATURES + 2) * MAX_HIDDEN + 2 * load.MAX_FEATURES + 1 < MAX_NUMBERS


def num_values(tree: object) -> int:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return 1 + sum(map(num_values, inner))


@pytest.mark.parametrize("one", [b"0", b"[]", b"{}", b"[[],[]]", b'{"a":[1,2,{"b":{}}],"c":0}'])
def test_values_are_bounded_however_they_are_nested(one: bytes) -> None:
    assert num_values(parse_strict(one)) <= most_values(one)
    fits = (MAX_VALUES - 2) // most_values(one)
    assert len(parse_strict(b"[" + b",".join([one] * fits) + b"]")) == fits
    refused("E_MANIFEST", parse_strict, b"[" + b",".join([one] * (fits + 3)) + b"]")


def test_keys_are_no_longer_than_names_and_named_where_they_are_twice() -> None:
    longest = "k" * MAX_KEY_CHARS
    assert parse_strict(f'{{"{longest}":1}}'.encode()) == {longest: 1}
    assert "256 characters" in str(
        refused("E_MANIFEST", parse_strict, f'{{"a":[{{"{longest}k":1}}]}}'.encode())
    )
    with pytest.raises(ArtifactError, match="'lossless' twice"):
        parse_strict(b'{"lossless":true,"lossless":false}')
