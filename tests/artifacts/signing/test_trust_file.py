"""The user's trust file: changed whole, one process at a time, never weakened by accident."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from specctl.artifacts.signing import SigningKey, Trust, TrustedKey
from specctl.artifacts.signing.trust import Verified
from specctl.artifacts.signing.trust_file import edit_trust, read_trust, trust_path
from specctl.errors import ArtifactError, OutputError, UsageError
from tests.artifacts.signing.keys import NAME, REVOKED, record, trusted


def test_a_user_without_a_file_believes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert trust_path() == tmp_path / "specctl" / "trust.json"
    assert Trust.load().record.keys == ()
    with pytest.raises(UsageError):
        Trust.load(tmp_path / "named.json")


def test_edits_add_up(tmp_path: Path) -> None:
    """Threads here; each edit opens a lock of its own, as a process would."""
    place, keys = tmp_path / "deep" / "trust.json", [SigningKey.generate() for _ in range(8)]

    def add(key: SigningKey) -> None:
        with edit_trust(place) as edit:
            edit.add(trusted(key))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, keys))
    with edit_trust(place) as edit:
        edit.require("qwen3-*")
        edit.remove(keys[0].key_id)
    found = Trust.load(place)
    assert {key.key_id for key in found.record.keys} == {key.key_id for key in keys[1:]}
    assert found.requires(NAME)


def test_a_revoked_key_is_not_trusted_again(tmp_path: Path) -> None:
    place, key = tmp_path / "trust.json", SigningKey.generate()
    with edit_trust(place) as edit:
        edit.add(trusted(key))
        edit.revoke(key.key_id, "lost\x1b[2J laptop")
    before = place.read_bytes()
    with pytest.raises(UsageError, match="revoked"), edit_trust(place) as edit:
        edit.add(trusted(key))
    assert place.read_bytes() == before
    revoked = read_trust(place).keys[0].revoked
    assert revoked is not None
    assert "\x1b" not in revoked.reason


def test_what_cannot_be_done_changes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "trust.json"
    with edit_trust(place) as edit:
        edit.add(trusted(SigningKey.generate()))
    before = place.read_bytes()
    with pytest.raises(UsageError), edit_trust(place) as edit:
        edit.remove("ed25519:" + "0" * 64)
    with pytest.raises(UsageError), edit_trust(place) as edit:
        edit.require("[a-z]")
    assert place.read_bytes() == before
    place.write_bytes(b"{}")
    with pytest.raises(ArtifactError, match="E_SCHEMA"), edit_trust(place):
        pass
    with pytest.raises(OutputError), edit_trust(place / "below" / "trust.json"):
        pass


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_trust_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    place, key = tmp_path / "trust.json", SigningKey.generate()
    with edit_trust(place) as edit:
        edit.add(trusted(key))
    place.chmod(mode)
    with pytest.raises(UsageError, match="chmod go-w"):
        Trust.load(place)
    with pytest.raises(UsageError, match="chmod go-w"), edit_trust(place):
        pass
    place.chmod(0o644)
    assert Trust.load(place).record.key(key.key_id)


def test_what_is_written_can_be_read_again_whatever_the_umask(tmp_path: Path) -> None:
    place, before = tmp_path / "trust.json", os.umask(0o002)
    try:
        with edit_trust(place) as edit:
            edit.require("a*")
    finally:
        os.umask(before)
    assert Trust.load(place).requires("abc")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trust.json")
    with pytest.raises(UsageError, match="owner alone"):
        Trust.load(tmp_path / "trust.json")


def test_a_root_keeps_its_registries_and_others_have_none(tmp_path: Path) -> None:
    place, key, other = tmp_path / "trust.json", SigningKey.generate(), SigningKey.generate()
    with edit_trust(place) as edit:
        edit.add(trusted(key, "root", registries=("s3://bucket/a",)))
        edit.add(trusted(other))
    assert place.read_text().count("registries") == 1, "others are as they were"
    here, there = (Trust.load(place).at(url) for url in ("s3://bucket/a", "s3://bucket/b"))
    assert (here.has_root, there.has_root) == (True, False)
    with pytest.raises(ValidationError, match="only of a root"):
        TrustedKey.model_validate({**dict(iter(trusted(other))), "registries": ("x",)})


def test_another_way_to_a_folder_is_the_same_registry(tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "team")
    root = trusted(SigningKey.generate(), "root", registries=(str(tmp_path / "team"),))
    believed = Trust(record(root))
    assert believed.at(str(tmp_path / "link")).has_root
    assert not believed.at(str(tmp_path / "other")).has_root
    scoped = trusted(
        SigningKey.generate(), "root", registries=(f"oci://host/x?log={tmp_path}/team",)
    )
    believed = Trust(record(scoped))
    assert believed.at(f"oci://host/x?log={tmp_path}/link").has_root
    for other in (f"oci://host/y?log={tmp_path}/link", f"oci://host/x?log={tmp_path}/other"):
        assert not believed.at(other).has_root


def test_what_is_known_of_a_root_elsewhere_is_not_delegated_anew() -> None:
    """A key that the user revoked, as the root of another registry, comes in as no publisher."""
    key = SigningKey.generate()
    ours = trusted(key, "root", registries=("elsewhere",), revoked=REVOKED)
    here = Trust(record(ours)).at("here")
    found = here.with_delegated(record(trusted(key, "publisher")), Verified(b"", ("root",)))
    assert found.record.keys[0].roles == ()
