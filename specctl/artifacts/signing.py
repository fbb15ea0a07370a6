"""Signatures of artifacts: Ed25519 keys in files, DSSE envelopes, and the statement they hold.

An envelope (DSSE v1) is bytes, their type, and any number of signatures over both, so bytes signed
as one type are never a signature of another. It names no algorithm: the key decides. Reading is
stricter than github.com/secure-systems-lab/dsse: no URL-safe base64, no unknown fields. The payload
about an artifact is an in-toto statement (v1) of one subject: a name, and the digest of
`config.json`, which lists all other files. So a signature that was moved to another manifest, or to
another name, speaks of something else. Which keys are believed is decided by `registry.trust`.

cryptography is imported where a key is used: a box that only runs unsigned policies needs none.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from specctl.artifacts.files import read_folder
from specctl.artifacts.manifest import SIGNATURE, Name, UtcTime, utc_now
from specctl.artifacts.strict_json import parse_strict
from specctl.durable import output_errors, replace_file, sync_folder, write_new
from specctl.errors import ArtifactError, OutputError, UsageError
from specctl.records import Record, canonical_json, describe_violation

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PASSPHRASE = "SPECCTL_KEY_PASSPHRASE"
"""Environment variable: encrypts key files where it is set, and decrypts them."""
WRITABLE = "correct permissions or free space, or name another place"
STATEMENT_TYPE = "application/vnd.in-toto+json"
KEY_PREFIX, PUBLIC_KEY_BYTES, MAX_KEY_FILE_BYTES = "ed25519:", 32, 16 << 10
MAX_ENVELOPE_BYTES, MAX_SIGNATURES = 1 << 20, 16
R = TypeVar("R", bound=Record)
_TYPE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.+/_-]{0,127}")


def bad_signature(expected: str, found: Any, fix: str = "do not load it") -> ArtifactError:
    """The refusal of a signature (E_SIG)."""
    return ArtifactError("E_SIG", "signature", expected=expected, found=str(found), fix=fix)


# ------------------------------------------------------------------ keys


def key_id_of(public_key: bytes) -> str:
    """`ed25519:<sha256 hex>` of a raw public key of 32 bytes."""
    return KEY_PREFIX + hashlib.sha256(public_key).hexdigest()


@dataclass(frozen=True, repr=False)
class SigningKey:
    """A private key; `generate` or `load` one.

    Attributes:
        public_key: raw, 32 bytes.
    """

    private: Ed25519PrivateKey
    public_key: bytes

    @property
    def key_id(self) -> str:
        return key_id_of(self.public_key)

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key of the system's randomness."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        private = Ed25519PrivateKey.generate()
        return cls(private, private.public_key().public_bytes_raw())

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Reads a key that `save` wrote: PEM, PKCS8.

        Raises:
            UsageError: no file, one that others can read, another kind of key, or a passphrase
                that is missing or wrong.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        data, phrase = _read_private(path), os.environ.get(PASSPHRASE, "").encode() or None
        is_encrypted = b"ENCRYPTED" in data
        wanted = f"the passphrase of the key, in {PASSPHRASE}"
        if is_encrypted and phrase is None:
            raise _unusable(path, "none", wanted)
        if phrase is not None and not is_encrypted:
            raise UsageError(
                f"key {path}",
                expected=f"an encrypted key, as {PASSPHRASE} is set",
                found="one that is not encrypted",
                fix=f"unset {PASSPHRASE} for this key",
            )
        try:
            private: Any = load_pem_private_key(data, phrase)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            if is_encrypted:
                raise _unusable(path, "another one", wanted) from None
            raise _unusable(path, "something else", "a private key, PEM") from None
        _check_ed25519(path, private)
        return cls(private, private.public_key().public_bytes_raw())

    def save(self, path: Path) -> Path:
        """Writes the key for its owner alone, and the public key beside it, `<path>.pub`.

        Both are PEM; the private key is encrypted where `SPECCTL_KEY_PASSPHRASE` is set.

        Returns:
            The place of the public key.

        Raises:
            OutputError: one of the files exists, or cannot be written.
        """
        from cryptography.hazmat.primitives import serialization as form

        phrase, public = os.environ.get(PASSPHRASE, "").encode(), path.with_name(f"{path.name}.pub")
        encryption = form.BestAvailableEncryption(phrase) if phrase else form.NoEncryption()
        pem, kind = form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
        files = {
            path: (self.private.private_bytes(pem, form.PrivateFormat.PKCS8, encryption), 0o600),
            public: (self.private.public_key().public_bytes(pem, kind), 0o644),
        }
        try:
            for place in files:
                if os.path.lexists(place):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
            for place, (data, mode) in files.items():
                write_new(place, data, mode=mode)
            sync_folder(path.absolute().parent)
        except OSError as error:
            expected, found = "a new file that can be written", _reason(error)
            fix = "choose another name; an existing key is never replaced"
            if isinstance(error, FileNotFoundError):
                expected, found = f"the folder {path.absolute().parent}", "none"
                fix = "make it, or name another place"
            what = f"key {error.filename or path}"
            raise OutputError(what, expected=expected, found=found, fix=fix) from error
        return public

    def sign_bytes(self, data: bytes) -> bytes:
        """The signature of some bytes, 64 bytes."""
        return self.private.sign(data)

    def sign(self, payload_type: str, payload: bytes) -> bytes:
        """A DSSE envelope with this key's signature."""
        made = Signature(self.key_id, self.sign_bytes(pae(payload_type, payload)))
        return envelope_bytes(payload_type, payload, [made])


def load_public(path: Path) -> bytes:
    """The raw public key of a PEM file.

    Raises:
        UsageError: no such file, or another kind of key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise _unusable(path, _reason(error), "a file that can be read") from None
    if b"PRIVATE KEY-----" in data:
        raise UsageError(
            f"key {path}",
            expected="a public key",
            found="a private key",
            fix=f"name {path}.pub, and show the private key to nobody",
        )
    try:
        key: Any = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise _unusable(path, "something else", "a public key, PEM") from None
    _check_ed25519(path, key)
    raw: bytes = key.public_bytes_raw()
    return raw


def is_signature(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the owner of a public key signed these bytes."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _read_private(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unusable(path, _reason(error), "a file that can be read") from None
    try:
        mode = os.fstat(handle).st_mode
        data = os.read(handle, MAX_KEY_FILE_BYTES) if stat.S_ISREG(mode) else b""
    finally:
        os.close(handle)
    if b"PUBLIC KEY-----" in data:
        is_beside = path.suffix == ".pub"
        private = path.with_suffix("") if is_beside else "the one that it was made with"
        raise UsageError(
            f"key {path}", expected="a private key", found="a public key", fix=f"name {private}"
        )
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise UsageError(
            f"key {path}",
            expected="a file that its owner alone can read",
            found=stat.filemode(mode),
            fix=f"chmod 600 {path}; if others could read it for long, revoke it",
        )
    return data


def _check_ed25519(path: Path, key: object) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
        return
    is_elliptic = isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey)
    raise UsageError(
        f"key {path}",
        expected="an Ed25519 key",
        found="an elliptic curve key" if is_elliptic else "another kind of key",
        fix="make one with `specctl registry keygen`",
    )


def _unusable(path: Path, found: str, expected: str) -> UsageError:
    fix = f"name a file of `specctl registry keygen`; set {PASSPHRASE} if it is encrypted"
    return UsageError(f"key {path}", expected=expected, found=found, fix=fix)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


# ------------------------------------------------------------------ envelopes


@dataclass(frozen=True)
class Signature:
    """A key's signature of the pre-authentication encoding; not verified yet."""

    key_id: str
    signature: bytes


@dataclass(frozen=True)
class Envelope:
    """A payload, its media type, and any number of signatures."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...]


class _SignatureJson(Record):
    keyid: str = Field(min_length=1, max_length=128)
    sig: str


class _EnvelopeJson(Record):
    payload: str
    payloadType: str  # noqa: N815  the field's name in the standard
    signatures: tuple[_SignatureJson, ...] = Field(max_length=MAX_SIGNATURES)


def pae(payload_type: str, payload: bytes) -> bytes:
    """The pre-authentication encoding: the bytes that a signature is of."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def envelope_bytes(
    payload_type: str, payload: bytes, signatures: Iterable[Signature] = ()
) -> bytes:
    """An envelope as canonical JSON; without signatures it vouches for nothing."""
    signed = [{"keyid": one.key_id, "sig": _encode(one.signature)} for one in signatures]
    tree = {"payload": _encode(payload), "payloadType": payload_type, "signatures": signed}
    return canonical_json(tree).encode()


def add_signature(data: bytes, key: SigningKey) -> bytes:
    """The envelope with one more signature over the same payload.

    Raises:
        ArtifactError: E_SIG for bytes that are not an envelope.
    """
    found = parse_envelope(data)
    made = Signature(key.key_id, key.sign_bytes(pae(found.payload_type, found.payload)))
    others = [one for one in found.signatures if one.key_id != key.key_id]
    return envelope_bytes(found.payload_type, found.payload, [*others, made])


def parse_envelope(data: bytes) -> Envelope:
    """The envelope of some bytes; its signatures are not verified here.

    Raises:
        ArtifactError: E_SIG for anything but strict JSON of the three fields, standard base64 in
            its one form, at most `MAX_SIGNATURES` signatures of different keys.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise bad_signature(f"at most {MAX_ENVELOPE_BYTES} bytes", f"{len(data)}")
    found = parse_signed(data, _EnvelopeJson, "payload, payloadType and signatures")
    if not _TYPE.fullmatch(found.payloadType):
        raise bad_signature("a media type", repr(found.payloadType))
    if len({one.keyid for one in found.signatures}) < len(found.signatures):
        raise bad_signature("one signature of each key", "two of one key")
    signatures = tuple(Signature(one.keyid, _decode(one.sig)) for one in found.signatures)
    return Envelope(found.payloadType, _decode(found.payload), signatures)


def parse_signed(data: bytes, record: type[R], expected: str) -> R:
    """A record of strict JSON that is signed, or holds signatures (E_SIG for anything else)."""
    try:
        parse_strict(data)
        return record.model_validate_json(data)
    except ArtifactError as error:
        raise bad_signature(error.expected, error.found) from None
    except ValidationError as error:
        raise bad_signature(expected, describe_violation(error)) from None


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise bad_signature("standard base64", "other characters or padding") from None
    if _encode(data) != text:  # bits behind the end: two texts of one value
        raise bad_signature("base64 in its one form", "bits behind the end")
    return data


# ------------------------------------------------------------------ statements


class Sha256(Record):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Subject(Record):
    """A name, and the manifest that it may stand for."""

    name: Name
    digest: Sha256


class Validity(Record):
    """The time of signing and of expiry (UTC), and the version of specctl that signed."""

    created: UtcTime
    expires: UtcTime | None
    specctl_version: Name


class Statement(Record):
    """The signed payload."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: Annotated[tuple[Subject, ...], Field(min_length=1, max_length=1)]
    predicate_type: Literal["urn:specctl:artifact:v1"] = Field(alias="predicateType")
    predicate: Validity


def sign_artifact(
    key: SigningKey,
    manifest_digest: str,
    name: str,
    *,
    created: str | None = None,
    expires: str | None = None,
) -> bytes:
    """An envelope that vouches for a manifest under a name.

    Args:
        manifest_digest: identity of the artifact, `sha256:<hex>`.
        created, expires: UTC; None is now, and never.
    """
    payload = statement_bytes(manifest_digest, name, created or utc_now(), expires)
    return key.sign(STATEMENT_TYPE, payload)


def statement_bytes(manifest_digest: str, name: str, created: str, expires: str | None) -> bytes:
    """The statement as canonical JSON."""
    subject = Subject(name=name, digest=Sha256(sha256=manifest_digest.removeprefix("sha256:")))
    validity = Validity(created=created, expires=expires, specctl_version=version("specctl"))
    tree = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [subject.model_dump()],
        "predicateType": "urn:specctl:artifact:v1",
        "predicate": validity.model_dump(),
    }
    return canonical_json(tree).encode()


def check_statement(payload: bytes, manifest_digest: str, name: str) -> None:
    """Refuses a statement of another manifest, of another name, or of another form (E_SIG)."""
    [subject] = parse_signed(payload, Statement, "an in-toto statement").subject
    found = f"sha256:{subject.digest.sha256}"
    if found != manifest_digest:
        raise bad_signature(f"one of {manifest_digest}", f"one of {found}")
    if subject.name != name:
        raise bad_signature(f"one for the name {name}", f"one for {subject.name}")


def speaks_of(envelope: bytes, manifest_digest: str, name: str) -> bool:
    """Whether an envelope holds a statement of this manifest under this name, believed or not."""
    try:
        check_statement(parse_envelope(envelope).payload, manifest_digest, name)
    except ArtifactError:
        return False
    return True


def sign_folder(folder: Path, key: SigningKey, name: str, *, expires: str | None = None) -> str:
    """Signs an artifact under a name, in `signature.dsse.json`; returns its digest.

    A signature that is there for the same artifact and name is kept beside the new one, under
    its own times; any other is replaced.

    Args:
        expires: UTC; None is never.

    Raises:
        ArtifactError: an artifact that must not be loaded is not signed either.
        OutputError: the signature cannot be written.
    """
    from specctl.artifacts.load import load_files  # here: it needs torch

    files, place = read_folder(folder), folder / SIGNATURE
    digest, found = load_files(files, artifact=str(folder)).digest, files.get(SIGNATURE)
    if found is not None and expires is None and speaks_of(found, digest, name):
        made = add_signature(found, key)
    else:
        made = sign_artifact(key, digest, name, expires=expires)
    with output_errors(place, "signature", WRITABLE):
        replace_file(place, made)
    return digest
