"""Keys in files of their owner alone; envelopes by the standard, with one form of reading."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from specctl.artifacts import signing
from specctl.errors import ArtifactError, UsageError

KIND, PAYLOAD = "application/vnd.test+json", b'{"a":1}'


def by_the_standard(kind: bytes, body: bytes) -> bytes:
    """PAE(type, body) = "DSSEv1" + SP + LEN(type) + SP + type + SP + LEN(body) + SP + body."""
    parts = [b"DSSEv1", str(len(kind)).encode(), kind, str(len(body)).encode(), body]
    return b"\x20".join(parts)


def test_the_encoding_is_that_of_the_protocol() -> None:
    """The example of the protocol's own page, and an independent writing of its definition."""
    example = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert signing.pae("http://example.com/HelloWorld", b"hello world") == example
    for kind, body in ((KIND, PAYLOAD), ("a", b""), ("a", b"1 b"), ("a 1", b"b"), ("é", b"\0 1")):
        assert signing.pae(kind, body) == by_the_standard(kind.encode(), body)


def test_a_signature_is_of_the_encoding_and_any_ed25519_verifies_it() -> None:
    key = signing.SigningKey.generate()
    tree = json.loads(key.sign(KIND, PAYLOAD))
    assert set(tree) == {"payload", "payloadType", "signatures"}
    assert base64.b64decode(tree["payload"]) == PAYLOAD
    [signature] = tree["signatures"]
    assert set(signature) == {"keyid", "sig"}
    public = Ed25519PublicKey.from_public_bytes(key.public_key)
    made = base64.b64decode(signature["sig"])
    public.verify(made, by_the_standard(KIND.encode(), PAYLOAD))  # raises where it is not


@given(st.binary(max_size=64), st.none() | st.binary(min_size=1, max_size=70))
def test_what_is_written_is_read(payload: bytes, signature: bytes | None) -> None:
    given_one = None if signature is None else ("key", signature)
    found = signing.parse_envelope(signing.envelope_bytes(KIND, payload, given_one))
    [read] = [(one.key_id, one.signature) for one in found.signatures] or [None]
    assert (found.payload_type, found.payload, read) == (KIND, payload, given_one)
    assert found.key_id == (None if signature is None else "key")


def changed(**fields: Any) -> bytes:
    tree = json.loads(signing.SigningKey.generate().sign(KIND, PAYLOAD))
    return json.dumps({**tree, **fields}).encode()


SIG = {"keyid": "k", "sig": "AAAA"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{" * 100_000,
        b'{"payload":"","payload":"","payloadType":"a","signatures":[]}',
        changed(payload="!!!"),
        changed(payload="eyJhIjoxfQ"),  # without its padding
        changed(payload="eyJhIjoxfR=="),  # bits behind the end
        changed(payload="eyJh\nIjoxfQ=="),
        changed(payloadType="a\nb"),
        changed(payloadType="x" * 200),
        changed(alg="none"),
        changed(signatures=[{**SIG, "alg": "none"}]),
        changed(signatures=[{"keyid": "k"}]),
        changed(signatures=[{**SIG, "sig": "AA-_"}]),
        changed(signatures=[SIG, {**SIG, "keyid": "other"}]),
        changed(payload="A" * (signing.MAX_ENVELOPE_BYTES + 4)),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError) as refusal:
        signing.parse_envelope(data)
    assert refusal.value.code == "E_SIG"
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 1000


def test_a_key_comes_back_from_its_file(tmp_path: Path) -> None:
    key = signing.SigningKey.generate()
    assert key.save(tmp_path / "key") == tmp_path / "key.pub"
    loaded = signing.SigningKey.load(tmp_path / "key")
    assert loaded.key_id == key.key_id == "ed25519:" + hashlib.sha256(key.public_key).hexdigest()
    assert signing.load_public(tmp_path / "key.pub") == key.public_key
    assert signing.parse_envelope(loaded.sign(KIND, b"text")).is_signed_by(key.public_key)
    assert not signing.parse_envelope(
        signing.SigningKey.generate().sign(KIND, b"text")
    ).is_signed_by(key.public_key)


def test_a_private_key_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        signing.SigningKey.generate().save(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    signing.SigningKey.generate().save(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        signing.SigningKey.load(tmp_path / "key")


def test_a_passphrase_encrypts_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signing.PASSPHRASE, "open sesame")
    key = signing.SigningKey.generate()
    key.save(tmp_path / "key")
    assert b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    assert signing.SigningKey.load(tmp_path / "key").key_id == key.key_id
    for wrong, words in (("", "is encrypted; set SPECCTL_KEY"), ("no", "has another passphrase")):
        monkeypatch.setenv(signing.PASSPHRASE, wrong)
        with pytest.raises(UsageError, match=words):
            signing.SigningKey.load(tmp_path / "key")
    monkeypatch.delenv(signing.PASSPHRASE)
    signing.SigningKey.generate().save(tmp_path / "open")
    monkeypatch.setenv(signing.PASSPHRASE, "open sesame")
    with pytest.raises(UsageError, match="is not encrypted; set SPECCTL_KEY_PASSPHRASE"):
        signing.SigningKey.load(tmp_path / "open")


def test_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    pem = other.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (tmp_path / "ec").write_bytes(pem)
    (tmp_path / "ec").chmod(0o600)
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    says = {"ec": "is no Ed25519 key", "text": "is no PEM key", "absent": "read", ".": "read"}
    for name, words in says.items():
        with pytest.raises(UsageError, match=words):
            signing.SigningKey.load(tmp_path / name)
        with pytest.raises(UsageError):
            signing.load_public(tmp_path / name)


def test_a_private_key_does_not_show_itself() -> None:
    raw = ed25519.Ed25519PrivateKey.generate()
    assert raw.private_bytes_raw().hex() not in repr(signing.SigningKey(raw))
