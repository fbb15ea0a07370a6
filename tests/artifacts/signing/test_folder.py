"""Signed folders: the signature stands beside what it vouches for, and is no part of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl.artifacts import load_artifact
from specctl.artifacts.manifest import SIGNATURE
from specctl.artifacts.signing import SigningKey, parse_envelope
from specctl.artifacts.signing.folder import sign_folder, verify_folder
from specctl.errors import ArtifactError
from tests.artifacts.examples import write_artifact
from tests.artifacts.signing.keys import LATER, NAME, trust, trusted

KEY, OTHER = SigningKey.generate(), SigningKey.generate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "artifact", "chain")


def test_signing_does_not_change_the_identity(folder: Path) -> None:
    before = load_artifact(folder).digest
    assert sign_folder(folder, KEY, NAME) == before == load_artifact(folder).digest
    digest, verified = verify_folder(folder, trust(trusted(KEY)), NAME)
    assert (digest, verified.key_ids) == (before, (KEY.key_id,))


def test_another_publisher_signs_beside_the_first(folder: Path) -> None:
    sign_folder(folder, KEY, NAME)
    sign_folder(folder, OTHER, NAME)
    both = trust(trusted(KEY), trusted(OTHER), threshold=2)
    assert len(verify_folder(folder, both, NAME)[1].key_ids) == 2
    sign_folder(folder, KEY, NAME, expires=LATER)  # another promise: of this key alone
    [signature] = parse_envelope((folder / SIGNATURE).read_bytes()).signatures
    assert signature.key_id == KEY.key_id


def test_a_folder_that_changed_is_not_vouched_for(folder: Path, tmp_path: Path) -> None:
    sign_folder(folder, KEY, NAME)
    other = write_artifact(tmp_path / "other", "eagle2")
    (other / SIGNATURE).write_bytes((folder / SIGNATURE).read_bytes())
    with pytest.raises(ArtifactError, match="E_SIG"):
        verify_folder(other, trust(trusted(KEY)), NAME)
    sign_folder(other, OTHER, NAME)  # a signature of something else is replaced
    verify_folder(other, trust(trusted(OTHER)), NAME)


def test_unsigned_and_huge_are_refused(folder: Path) -> None:
    believed = trust(trusted(KEY))
    with pytest.raises(ArtifactError, match="no signature"):
        verify_folder(folder, believed, NAME)
    (folder / SIGNATURE).write_bytes(b" " * (2 << 20))
    with pytest.raises(ArtifactError, match="E_SI"):
        verify_folder(folder, believed, NAME)


def test_what_would_wait_for_ever_is_no_signature(folder: Path) -> None:
    """A pipe, or a link to one, in place of the signature: whoever opens it is hung."""
    os.mkfifo(folder / SIGNATURE)
    with pytest.raises(ArtifactError, match="E_FILETYPE"):
        verify_folder(folder, trust(trusted(KEY)), NAME)
    with pytest.raises(ArtifactError, match="E_FILETYPE"):
        sign_folder(folder, KEY, NAME)
