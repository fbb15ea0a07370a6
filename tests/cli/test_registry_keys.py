"""`specctl registry keygen|sign|verify-signature|trust` and `run --allow-mismatch`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.registry import listing
from tests.cli.command import (
    ARTIFACT,
    NAME,
    USAGE,
    new_key,
    passes,
    publish,
    refuses,
    specctl,
    trust,
    write_artifact,
)
from tests.cli.conftest import SMALL


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key pair of a user with an own, empty configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SPECCTL_KEY_PASSPHRASE", raising=False)
    passes("registry", "keygen", tmp_path / "key")
    return tmp_path / "key"


def test_signed_trusted_verified_revoked(key: Path, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "chain")
    public = key.with_name("key.pub")
    made = json.loads(
        passes("registry", "sign", folder, "--key", key, "--name", NAME, "--json").out
    )
    verify = ("registry", "verify-signature", folder, "--name", NAME)
    assert "E_SIG" in refuses(ARTIFACT, *verify)
    passes("registry", "trust", "add", public, "--name", "embedded*", "--role", "publisher")
    shown = json.loads(passes(*verify, "--json").out)
    assert shown["digest"] == made["digest"]
    [key_id] = shown["key_ids"]
    assert "E_SIG" in refuses(ARTIFACT, *verify[:-1], "other")
    assert key_id in passes("registry", "trust", "list").out.replace("\n", "")
    passes("registry", "trust", "revoke", key_id, "--reason", "lost laptop")
    assert "lost laptop" in refuses(ARTIFACT, *verify)
    passes("registry", "trust", "require", "embedded*")
    record = json.loads(passes("registry", "trust", "list", "--json").out)
    assert (len(record["keys"]), record["require"]) == (1, ["embedded*"])


def test_a_passphrase_is_asked_for_where_the_key_has_one(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign = ("registry", "sign", write_artifact(tmp_path / "policy", "chain"), "--name", NAME)
    monkeypatch.setenv("SPECCTL_KEY_PASSPHRASE", "right")
    unlike = refuses(USAGE, *sign, "--key", key)
    assert "not encrypted; unset SPECCTL_KEY_PASSPHRASE" in unlike
    passes("registry", "keygen", tmp_path / "closed")
    closed = (*sign, "--key", tmp_path / "closed")
    passes(*closed)
    monkeypatch.setenv("SPECCTL_KEY_PASSPHRASE", "wrong")
    assert "expected the passphrase of the key" in refuses(USAGE, *closed)
    monkeypatch.delenv("SPECCTL_KEY_PASSPHRASE")
    assert "expected the passphrase of the key" in refuses(USAGE, *closed)


@pytest.mark.parametrize(("part", "code"), [("drafter", "E_TARGET"), ("tokenizer", "E_TOKENIZER")])
def test_a_policy_of_another_pair_runs_where_the_user_says_so(
    tmp_path: Path, prompts: Path, part: str, code: str
) -> None:
    """The text is the target's all the same: that is what makes the flag harmless."""
    changes = {f"{part}_digest": "sha256:" + "1" * 64}
    folder = write_artifact(tmp_path / "policy", "chain", **changes)
    run = ("run", prompts, "--limit", 1, "--compare", f"ar,{folder}", *SMALL, "--json")
    assert f"{code} {part}" in refuses(ARTIFACT, *run)
    outcome = specctl(*run, "--allow-mismatch")
    assert outcome.code == 0
    assert outcome.err.startswith(f"warning: {code} {part}: wanted sha256:")
    rows = json.loads(outcome.out)
    assert [row["policy"] for row in rows] == ["ar", "chain"]
    assert rows[1]["equal_to_ar"] is True


def test_a_lossy_policy_of_another_pair_runs_under_no_flag(tmp_path: Path, prompts: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "adasd", drafter_digest="sha256:" + "1" * 64)
    run = ("run", prompts, "--limit", 1, "--policy", folder, *SMALL)
    line = refuses(ARTIFACT, *run, "--allow-mismatch", "--allow-lossy")
    assert "E_TARGET" in line
    assert "--allow-mismatch" not in line


def test_the_list_says_who_is_trusted_now(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no key is trusted yet" in passes("registry", "trust", "list").out
    add = ("registry", "trust", "add", f"{key}.pub", "--name", "*", "--role", "publisher")
    passes(*add, "--not-after", "2201-01-01T00:00:00Z")
    for year, state in {"2200": " trusted ", "2202": "expired: trusted for"}.items():
        monkeypatch.setattr(listing, "utc_now", lambda year=year: f"{year}-06-01T00:00:00Z")
        assert state in " ".join(passes("registry", "trust", "list").out.split())


def test_a_pulled_folder_is_verified_elsewhere(
    registry: Path, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """Signed by two keys with one push; required or not, online or not, and published again."""
    keys, file = [new_key(tmp_path, word) for word in ("ann", "bob")], tmp_path / "trust.json"
    signing = [word for key in keys for word in ("--key", key)]
    publish(artifacts, "chain", *signing)
    for key in keys:
        trust(key, file=file)

    def check(out: str, *options: object) -> None:
        place = tmp_path / out
        specctl("registry", "pull", f"{NAME}@prod", "-o", place, *options)
        found = passes("registry", "verify-signature", place, "--name", NAME, "--trust", file)
        assert found.out.count("ed25519:") == 2

    check("not required")
    passes("registry", "trust", "require", "*", "--trust", file)
    check("required", "--trust", file)
    check("offline", "--trust", file, "--offline")
    passes("registry", "push", tmp_path / "required", NAME, *signing)
    check("again", "--trust", file)
