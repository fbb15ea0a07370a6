"""OpenSSF's model-signing both ways, with its own command line, and what its verifier lets pass."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specctl.artifacts import load_artifact
from specctl.artifacts.manifest import BUNDLE
from specctl.artifacts.signing import SigningKey
from specctl.artifacts.signing.folder import sign_folder
from specctl.artifacts.signing.oms import generate_ec_key, sign_bundle, verify_bundle
from specctl.errors import ArtifactError, UsageError
from tests.artifacts.examples import write_artifact

THEIR_CLI = Path(sys.executable).with_name("model_signing")


def theirs(*arguments: object) -> int:
    """Exit code of model-signing's own command line."""
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [THEIR_CLI, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, env=quiet).returncode


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two key pairs, and an artifact that the first signed with ours."""
    room = tmp_path_factory.mktemp("oms")
    for name in ("key", "stranger"):
        generate_ec_key(room / name, room / f"{name}.pub")
    sign_bundle(write_artifact(room / "ours", "chain"), room / "key")
    return room


def copied(room: Path, tmp_path: Path, name: str = "ours") -> Path:
    return Path(shutil.copytree(room / name, tmp_path / "copy"))


def test_their_command_line_verifies_what_we_sign(room: Path, tmp_path: Path) -> None:
    folder = copied(room, tmp_path)
    verify = ("verify", "key", "--signature", folder / BUNDLE)
    assert theirs(*verify, "--public_key", room / "key.pub", folder) == 0
    (folder / "README.md").write_text("# other\n")
    assert theirs(*verify, "--public_key", room / "key.pub", folder) != 0


@pytest.mark.parametrize("first", ["bundle", "envelope"])
def test_an_envelope_may_be_added_before_or_after_the_bundle(
    room: Path, tmp_path: Path, first: str
) -> None:
    """Also one that takes the place of another, and in a folder that was copied since."""
    folder = write_artifact(tmp_path / "made", "chain")
    steps = [
        lambda: sign_bundle(folder, room / "key"),
        lambda: sign_folder(folder, SigningKey.generate(), "qwen+eagle"),
    ]
    for sign in steps if first == "bundle" else steps[::-1]:
        sign()
    sign_folder(folder, SigningKey.generate(), "qwen+eagle")
    for place in (folder, Path(shutil.copytree(folder, tmp_path / "elsewhere"))):
        verify = ("verify", "key", "--signature", place / BUNDLE)
        assert theirs(*verify, "--public_key", room / "key.pub", place) == 0
        assert verify_bundle(place, room / "key.pub") == load_artifact(place).digest


def test_we_verify_what_their_command_line_signs(room: Path, tmp_path: Path) -> None:
    """Their ignore list hides the card from their verifier, and not from ours."""
    folder = copied(room, tmp_path)
    (folder / BUNDLE).unlink()
    sign = ("sign", "key", "--signature", folder / BUNDLE, "--private_key", room / "key")
    assert theirs(*sign, folder) == 0
    assert verify_bundle(folder, room / "key.pub") == load_artifact(folder).digest
    assert theirs(*sign, "--ignore-paths", folder / "README.md", folder) == 0
    with pytest.raises(ArtifactError, match=r"E_SIG.*README\.md"):
        verify_bundle(folder, room / "key.pub")


def test_ours_verifies_and_keeps_the_identity(room: Path) -> None:
    assert verify_bundle(room / "ours", room / "key.pub") == load_artifact(room / "ours").digest


def test_what_the_hub_left_is_no_part_of_the_bundle(room: Path, tmp_path: Path) -> None:
    """Signed in a download and verified in a copy without it, and the other way round."""
    folder = copied(room, tmp_path)
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "CACHEDIR.TAG").write_text("x")
    (folder / ".gitattributes").write_text("* -text\n")
    digest = verify_bundle(folder, room / "key.pub")
    assert sign_bundle(folder, room / "key") == digest
    shutil.rmtree(folder / ".cache")
    (folder / ".gitattributes").unlink()
    assert verify_bundle(folder, room / "key.pub") == digest


@pytest.mark.parametrize("change", ["byte", "extra", "missing", "absent bundle", "cut bundle"])
def test_what_was_changed_is_refused(room: Path, tmp_path: Path, change: str) -> None:
    folder = copied(room, tmp_path)
    if change == "byte":
        (folder / "README.md").write_text("# other\n")
    elif change == "extra":
        (folder / "report.json").write_text("{}")
    elif change == "missing":
        (folder / "policy.safetensors").unlink()
    elif change == "absent bundle":
        (folder / BUNDLE).unlink()
    else:
        (folder / BUNDLE).write_bytes((folder / BUNDLE).read_bytes()[:-200])
    with pytest.raises(ArtifactError, match="E_SIG"):
        verify_bundle(folder, room / "key.pub")


def test_a_stranger_did_not_sign_it(room: Path) -> None:
    with pytest.raises(ArtifactError, match="E_SIG"):
        verify_bundle(room / "ours", room / "stranger.pub")


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "config.json"])
def test_a_list_that_was_altered_is_refused(room: Path, tmp_path: Path, name: str) -> None:
    folder = copied(room, tmp_path)
    tree = json.loads((folder / BUNDLE).read_text())
    payload = json.loads(base64.b64decode(tree["dsseEnvelope"]["payload"]))
    payload["predicate"]["resources"][0]["name"] = name
    tree["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    (folder / BUNDLE).write_text(json.dumps(tree))
    with pytest.raises(ArtifactError, match="E_SIG"):
        verify_bundle(folder, room / "key.pub")


def test_keys_of_the_other_kind_are_refused(room: Path, tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "ed")
    key.save_public(tmp_path / "ed.pub")
    with pytest.raises(UsageError, match="P-256"):
        sign_bundle(room / "ours", tmp_path / "ed", tmp_path / BUNDLE)
    with pytest.raises(UsageError, match="P-256"):
        verify_bundle(room / "ours", tmp_path / "ed.pub")


@pytest.mark.parametrize("place", ["folder", "named", "link"])
def test_a_bundle_that_would_wait_for_ever_is_refused(
    room: Path, tmp_path: Path, place: str
) -> None:
    folder = copied(room, tmp_path)
    named = tmp_path / "named.sig"
    if place == "folder":
        (folder / BUNDLE).unlink()
        os.mkfifo(folder / BUNDLE)
    elif place == "named":
        os.mkfifo(named)
    else:
        named.symlink_to(folder / BUNDLE)
    with pytest.raises(ArtifactError, match=r"E_FILETYPE|E_SIG"):
        verify_bundle(folder, room / "key.pub", None if place == "folder" else named)
