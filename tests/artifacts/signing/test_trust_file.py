"""The user's trust file: changed whole, one process at a time, never weakened by accident."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specctl.artifacts.signing import SigningKey, Trust
from specctl.artifacts.signing.trust_file import edit_trust, read_trust, trust_path
from specctl.errors import ArtifactError, OutputError, UsageError
from tests.artifacts.signing.keys import NAME, trusted


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
