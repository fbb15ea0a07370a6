"""Key files: for their owner alone, never replaced, of one kind."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from specctl.artifacts.signing import SigningKey
from specctl.artifacts.signing.key_files import PASSPHRASE
from specctl.artifacts.signing.keys import is_signature, load_public
from specctl.errors import OutputError, UsageError


def test_a_key_comes_back_from_its_file(tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "key")
    key.save_public(tmp_path / "key.pub")
    loaded = SigningKey.load(tmp_path / "key")
    assert loaded.key_id == key.key_id == "ed25519:" + hashlib.sha256(key.public_key).hexdigest()
    assert load_public(tmp_path / "key.pub") == key.public_key
    assert is_signature(key.public_key, loaded.sign_bytes(b"text"), b"text")
    assert not is_signature(key.public_key, loaded.sign_bytes(b"text"), b"other")


def test_a_private_key_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        SigningKey.generate().save(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    SigningKey.generate().save(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        SigningKey.load(tmp_path / "key")


def test_a_key_is_never_replaced(tmp_path: Path) -> None:
    first = SigningKey.generate()
    first.save(tmp_path / "key")
    with pytest.raises(OutputError, match="never replaced"):
        SigningKey.generate().save(tmp_path / "key")
    assert SigningKey.load(tmp_path / "key").key_id == first.key_id


def test_a_passphrase_encrypts_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSPHRASE, "open sesame")
    key = SigningKey.generate()
    key.save(tmp_path / "key")
    assert b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    assert SigningKey.load(tmp_path / "key").key_id == key.key_id
    for wrong in ("", "close sesame"):
        monkeypatch.setenv(PASSPHRASE, wrong)
        with pytest.raises(UsageError, match=PASSPHRASE):
            SigningKey.load(tmp_path / "key")


def test_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    pem = other.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (tmp_path / "ec").write_bytes(pem)
    (tmp_path / "ec").chmod(0o600)
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    for name in ("ec", "text", "absent", "."):
        with pytest.raises(UsageError):
            SigningKey.load(tmp_path / name)
        with pytest.raises(UsageError):
            load_public(tmp_path / name)


def test_a_private_key_does_not_show_itself() -> None:
    raw = ed25519.Ed25519PrivateKey.generate()
    key = SigningKey(raw, raw.public_key().public_bytes_raw())
    assert raw.private_bytes_raw().hex() not in repr(key)
