"""`specctl registry keygen|sign|verify-signature|trust` and `run --allow-mismatch`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from specctl.artifacts.signing import options
from tests.cli.command import passes, refuses, specctl, write_artifact
from tests.cli.conftest import SMALL

NAME = "embedded+eagle3@cpu:demo"
USAGE, ARTIFACT, OUTPUT = 2, 3, 6


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
    said = json.loads(
        passes("registry", "sign", folder, "--key", key, "--name", NAME, "--json").out
    )
    verify = ("registry", "verify-signature", folder, "--name", NAME)
    assert "E_SIG" in refuses(ARTIFACT, *verify)
    passes("registry", "trust", "add", public, "--name", "embedded*", "--role", "publisher")
    shown = json.loads(passes(*verify, "--json").out)
    assert shown["digest"] == said["digest"]
    [key_id] = shown["key_ids"]
    assert "E_SIG" in refuses(ARTIFACT, *verify[:-1], "other")
    assert key_id in passes("registry", "trust", "list").out.replace("\n", "")
    passes("registry", "trust", "revoke", key_id, "--reason", "lost laptop")
    assert "lost laptop" in refuses(ARTIFACT, *verify)
    passes("registry", "trust", "remove", key_id)
    passes("registry", "trust", "require", "embedded*")
    record = json.loads(passes("registry", "trust", "list", "--json").out)
    assert (record["keys"], record["require"]) == ([], ["embedded*"])


def test_refusals_of_keys_and_names(key: Path, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "chain")
    sign = ("registry", "sign", folder, "--key", key)
    add = ("registry", "trust", "add", key.with_name("key.pub"), "--role", "publisher")
    assert "never replaced" in refuses(OUTPUT, "registry", "keygen", key)
    (tmp_path / "half.pub").touch()
    assert "half.pub" in refuses(OUTPUT, "registry", "keygen", tmp_path / "half")
    assert not (tmp_path / "half").exists()
    assert "--name" in refuses(USAGE, *sign)
    assert "E_NAME" in specctl(*sign, "--name", "../x").err
    assert "past" in refuses(USAGE, *sign, "--name", NAME, "--expires", "2020-01-01T00:00:00Z")
    assert "UTC" in refuses(USAGE, *sign, "--name", NAME, "--expires", "2030-02-31T00:00:00Z")
    passes(*add, "--name", "*", "--not-before", "2020-01-01T00:00:00Z")
    assert "UTC" in refuses(USAGE, *add, "--name", "*", "--not-before", "soon")
    assert "names" in refuses(USAGE, *add, "--name", "[a-z]")
    assert "roles" in refuses(USAGE, *add[:-1], "admin", "--name", "*")
    key.chmod(0o644)
    assert "chmod 600" in refuses(USAGE, *sign, "--name", NAME)


def test_a_key_of_the_wrong_sort_is_named(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, public = write_artifact(tmp_path / "policy", "chain"), key.with_name("key.pub")
    curve = ec.generate_private_key(ec.SECP256R1())
    pem = curve.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (tmp_path / "ec").write_bytes(pem)
    (tmp_path / "ec").chmod(0o600)
    sign, add = ("registry", "sign", folder), ("registry", "trust", "add")
    curved = refuses(USAGE, *sign, "--key", tmp_path / "ec", "--name", NAME)
    assert "found an elliptic curve key; make one with `specctl registry keygen`" in curved
    private = refuses(USAGE, *add, key, "--name", "*", "--role", "publisher")
    assert f"found a private key; name {public}" in private
    given = refuses(USAGE, *sign, "--key", public, "--name", NAME)
    assert f"found a public key; name {key}" in given
    nowhere = refuses(OUTPUT, "registry", "keygen", tmp_path / "nodir" / "x")
    assert f"expected the folder {tmp_path / 'nodir'}, found none" in nowhere
    monkeypatch.setenv("SPECCTL_KEY_PASSPHRASE", "right")
    unlike = refuses(USAGE, *sign, "--key", key, "--name", NAME)
    assert "not encrypted; unset SPECCTL_KEY_PASSPHRASE" in unlike
    passes("registry", "keygen", tmp_path / "closed")
    monkeypatch.setenv("SPECCTL_KEY_PASSPHRASE", "wrong")
    closed = (*sign, "--key", tmp_path / "closed", "--name", NAME)
    assert "expected the passphrase of the key" in refuses(USAGE, *closed)
    monkeypatch.delenv("SPECCTL_KEY_PASSPHRASE")
    assert "expected the passphrase of the key" in refuses(USAGE, *closed)


@pytest.mark.parametrize(
    ("kind", "part", "code"),
    [("chain", "drafter", "E_TARGET"), ("chain", "tokenizer", "E_TOKENIZER")],
)
def test_a_policy_of_another_pair_runs_where_the_user_says_so(
    tmp_path: Path, prompts: Path, kind: str, part: str, code: str
) -> None:
    """The text is the target's all the same: that is what makes the flag harmless."""
    changes = {f"{part}_digest": "sha256:" + "1" * 64}
    folder = write_artifact(tmp_path / "policy", kind, **changes)
    run = ("run", prompts, "--limit", 1, "--compare", f"ar,{folder}", *SMALL, "--json")
    assert f"{code} {part}" in refuses(ARTIFACT, *run)
    outcome = specctl(*run, "--allow-mismatch")
    assert outcome.code == 0
    assert outcome.err.startswith(f"warning: {code} {part}: wanted sha256:")
    rows = json.loads(outcome.out)
    assert [row["policy"] for row in rows] == ["ar", kind]
    assert rows[1]["equal_to_ar"] is True


def test_a_lossy_policy_of_another_pair_runs_under_no_flag(tmp_path: Path, prompts: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "adasd", drafter_digest="sha256:" + "1" * 64)
    run = ("run", prompts, "--limit", 1, "--policy", folder, *SMALL)
    line = refuses(ARTIFACT, *run, "--allow-mismatch", "--allow-lossy")
    assert "E_TARGET" in line
    assert "--allow-mismatch" not in line


def test_a_root_of_one_registry_leaves_the_others_usable(key: Path, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "policy", "chain")
    signed, plain = tmp_path / "signed", tmp_path / "plain"
    for place in (signed, plain):
        passes("registry", "init", "--registry", place)
        passes("registry", "push", folder, NAME, "--alias", "prod", "--registry", place)
    pull = ("registry", "pull", f"{NAME}@prod", "--registry")
    add = ("registry", "trust", "add", key.with_name("key.pub"), "--name", "*", "--role")
    passes(*add, "root")
    assert "E_SIG" in refuses(ARTIFACT, *pull, plain)
    passes(*add, "root", "--registry", signed)
    passes(*pull, plain)
    assert "E_SIG" in refuses(ARTIFACT, *pull, signed)
    assert str(signed) in passes("registry", "trust", "list", "--json").out
    assert "root" in refuses(USAGE, *add, "publisher", "--registry", signed)


def test_a_new_reader_is_told_first_whom_to_believe(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot sign what they pull; the key that they lack is most often the root's."""
    folder = write_artifact(tmp_path / "policy", "chain")
    monkeypatch.setenv("SPECCTL_REGISTRY", str(tmp_path / "team"))
    passes("registry", "init")
    passes("registry", "push", folder, NAME, "--alias", "prod", "--key", key)
    passes("registry", "trust", "require", "*")
    line = refuses(ARTIFACT, "registry", "pull", f"{NAME}@prod")
    assert "the root key behind the registry's settings" in line.partition("sign it with")[0]


def test_a_marker_that_was_cut_is_restored_from_a_copy(tmp_path: Path) -> None:
    passes("registry", "init", "--registry", tmp_path / "team")
    marker = tmp_path / "team" / "registry.json"
    marker.write_bytes(marker.read_bytes()[:20])
    line = refuses(7, "registry", "list", "--registry", tmp_path / "team")
    assert "E_VERSION" in line
    assert "restore it from a copy of this registry" in line


def test_floors_are_listed_and_forgotten(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, team = write_artifact(tmp_path / "policy", "chain"), tmp_path / "team"
    at = ("--registry", team)
    passes("registry", "init", *at)
    passes("registry", "push", folder, NAME, "--alias", "prod", *at)
    passes("registry", "push", write_artifact(tmp_path / "new", "eagle2"), NAME, *at)
    passes("registry", "pull", f"{NAME}@prod", *at)
    [floor] = json.loads(passes("registry", "floors", "list", *at, "--json").out)
    assert (floor["name"], floor["generation"], floor["reason"]) == (NAME, 2, None)
    [last] = team.rglob("log/*/000000000002.json")
    last.unlink()
    line = refuses(7, "registry", "pull", f"{NAME}@prod", *at)
    assert "E_ROLLBACK" in line
    assert "specctl registry floors forget NAME --reason TEXT" in line
    forget = ("registry", "floors", "forget", NAME, *at)
    refuses(USAGE, *forget)
    [told] = json.loads(passes(*forget, "--reason", "ann removed it", "--json").out)
    assert told["digest"] == floor["digest"]
    assert "E_MISSING" in refuses(7, *forget, "--reason", "again")
    passes("registry", "pull", f"{NAME}@prod", *at)
    rows = json.loads(passes("registry", "floors", "list", *at, "--json").out)
    assert [(row["generation"], row["reason"]) for row in rows] == [
        (1, None),
        (2, "ann removed it"),
    ]


def test_the_list_says_which_keys_are_believed_now(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ("registry", "trust", "add", f"{key}.pub", "--name", "*", "--role", "publisher")
    early, late = "2200-01-01T00:00:00Z", "2201-01-01T00:00:00Z"
    assert "never believed" in refuses(USAGE, *add, "--not-before", late, "--not-after", early)
    states = {"2199": f"not before {early}", "2200": "believed", "2202": "expired: believed for"}
    passes(*add, "--not-before", early, "--not-after", late)
    for year, state in states.items():
        monkeypatch.setattr(options, "utc_now", lambda year=year: f"{year}-06-01T00:00:00Z")
        assert state in " ".join(passes("registry", "trust", "list").out.split())


def test_a_root_for_a_place_that_is_no_registry_is_warned_of(key: Path, tmp_path: Path) -> None:
    add = ("registry", "trust", "add", f"{key}.pub", "--name", "*", "--role", "root")
    passes("registry", "init", "--registry", tmp_path / "signed")
    passes(*add, "--registry", tmp_path / "signed")
    told = specctl(*add, "--registry", tmp_path / "singed")
    assert told.code == 0
    assert "singed" in told.err
    assert "E_NO_REGISTRY" in told.err


def test_a_time_is_written_in_its_one_form(key: Path, tmp_path: Path) -> None:
    """What Python reads as a time and no signature may hold."""
    folder = write_artifact(tmp_path / "artifact", "chain")
    for until in ("2227-1-31T12:00:00Z", "2227-02-31T12:00:00Z", "\uff12227-01-31T12:00:00Z"):
        sign = ("registry", "sign", folder, "--key", key, "--name", NAME, "--expires", until)
        assert "--expires: expected a UTC time to come" in refuses(USAGE, *sign)


def test_a_pulled_folder_is_verified_elsewhere(registry: Path, tmp_path: Path) -> None:
    """Signed by two keys with one push; asked for or not, online or not, and published again."""
    keys = [tmp_path / word for word in ("ann", "bob")]
    for key in keys:
        passes("registry", "keygen", key)
    folder, name = write_artifact(tmp_path / "artifact", "chain"), f"{NAME}@prod"
    signing = [word for key in keys for word in ("--key", key)]
    passes("registry", "push", folder, NAME, "--alias", "prod", *signing)
    trust = tmp_path / "trust.json"
    for key in keys:
        believed = ("--name", "*", "--role", "publisher", "--role", "promoter", "--trust", trust)
        passes("registry", "trust", "add", f"{key}.pub", *believed)

    def check(out: str, *options: object) -> None:
        place = tmp_path / out
        specctl("registry", "pull", name, "-o", place, *options)
        passes("registry", "verify-signature", place, "--name", NAME, "--trust", trust)

    check("unasked")
    passes("registry", "trust", "require", "*", "--num-keys", 2, "--trust", trust)
    check("asked", "--trust", trust)
    check("offline", "--trust", trust, "--offline")
    passes("registry", "push", tmp_path / "asked", NAME, *signing)
    check("again", "--trust", trust)
