"""`registry settings`: shown, edited and set again, without undoing what another set meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import passes, refuses
from tests.cli.registries import ALL_NAMES, new_key, said

USAGE, REGISTRY = 2, 7


@pytest.fixture
def key_id(registry: Path, tmp_path: Path) -> str:
    """A publisher key that the registry's settings, generation 0, believe."""
    key, record = new_key(tmp_path, "ann"), tmp_path / "record.json"
    add = ("trust", "add", f"{key}.pub", *ALL_NAMES, "--role", "publisher", "--trust", record)
    key_id: str = said(*add)["key_id"]
    passes("registry", "settings", record)
    return key_id


def shown(tmp_path: Path, name: str) -> Path:
    """A file of the settings as they are shown."""
    file = tmp_path / f"{name}.json"
    file.write_text(passes("registry", "settings", "--json").out)
    file.chmod(0o600)
    return file


def test_settings_made_from_older_ones_do_not_take_back_a_revocation(
    tmp_path: Path, key_id: str
) -> None:
    mine, theirs = shown(tmp_path, "mine"), shown(tmp_path, "theirs")
    passes("registry", "trust", "revoke", key_id, "--reason", "stolen", "--trust", theirs)
    assert said("settings", theirs)["generation"] == 1
    passes("registry", "trust", "require", "team*", "--trust", mine)
    line = refuses(REGISTRY, "registry", "settings", mine)
    assert "E_SETTINGS_CONFLICT" in line
    assert "generation 0" in line
    assert "generation 1, set by" in line
    [key] = said("settings")["keys"]
    assert key["revoked"]["reason"] == "stolen"
    again = shown(tmp_path, "again")
    passes("registry", "trust", "require", "team*", "--trust", again)
    assert said("settings", again)["generation"] == 2
    [key] = said("settings")["keys"]
    assert key["revoked"]["reason"] == "stolen"


def test_a_record_of_no_generation_replaces_others_only_where_one_says_which(
    tmp_path: Path, key_id: str
) -> None:
    own = tmp_path / "own.json"
    passes("registry", "trust", "require", "team*", "--trust", own)
    line = refuses(USAGE, "registry", "settings", own)
    assert "--expect-generation" in line
    assert "registry settings --json" in line
    wrong = ("registry", "settings", own, "--expect-generation", 3)
    assert "E_SETTINGS_CONFLICT" in refuses(REGISTRY, *wrong)
    assert said("settings", own, "--expect-generation", 0)["generation"] == 1
    assert said("settings", own)["generation"] == 2, "the same again takes nothing back"
    assert said("settings") == {**json.loads(own.read_text()), "generation": 2}


def test_the_generation_is_said_once(tmp_path: Path, key_id: str) -> None:
    mine = shown(tmp_path, "mine")
    line = refuses(USAGE, "registry", "settings", mine, "--expect-generation", 7)
    assert "as the record says" in line
    assert said("settings", mine, "--expect-generation", 0)["generation"] == 1
