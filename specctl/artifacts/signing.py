"""Signatures of artifacts: Ed25519 keys in files, DSSE envelopes, and the statement they hold.

An envelope (DSSE v1) holds a payload, its type, and at most one signature over both, so a signature
is valid for one type only. The key decides the algorithm. Reading is stricter than
github.com/secure-systems-lab/dsse: no URL-safe base64, no unknown fields, no second signature. The
payload about an artifact is an in-toto statement (v1) of one subject: a name, and the digest of
`config.json`, which lists all other files. A signature copied to another manifest or name therefore
does not match. `registry.trust` decides which keys are trusted. cryptography is imported only where
a key is used.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError

from specctl.artifacts.files import read_folder, read_plain
from specctl.artifacts.manifest import SIGNATURE, Name, UtcTime, utc_now
from specctl.artifacts.strict_json import parse_strict
from specctl.durable import output_errors, replace_file, sync_folder, write_new
from specctl.errors import ArtifactError, OutputError, UsageError, reason_of
from specctl.records import Record, canonical_json, describe_violation, require

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PASSPHRASE = "SPECCTL_KEY_PASSPHRASE"
"""Environment variable: if set, key files are encrypted and decrypted with it."""
WRITABLE = "correct permissions or free space, or name another place"
STATEMENT_TYPE = "application/vnd.in-toto+json"
KEY_PREFIX, PUBLIC_KEY_BYTES, MAX_KEY_FILE_BYTES = "ed25519:", 32, 16 << 10
MAX_ENVELOPE_BYTES = 1 << 20
R = TypeVar("R", bound=Record)


def bad_signature(problem: str, fix: str = "do not load it") -> ArtifactError:
    """The error of a signature (E_SIG)."""
    return ArtifactError("E_SIG", "signature", problem, hint=fix)


# ------------------------------------------------------------------ keys


def key_id_of(public_key: bytes) -> str:
    """`ed25519:<sha256 hex>` of a raw public key of 32 bytes."""
    return KEY_PREFIX + hashlib.sha256(public_key).hexdigest()


@dataclass(frozen=True, repr=False)
class SigningKey:
    """A private key; `generate` or `load` one."""

    private: Ed25519PrivateKey

    @property
    def public_key(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self.private.public_key().public_bytes_raw()

    @property
    def key_id(self) -> str:
        return key_id_of(self.public_key)

    @classmethod
    def generate(cls) -> SigningKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Reads a key that `save` wrote: PEM, PKCS8.

        Raises:
            UsageError: the file is absent or readable by others, the key is of another kind, or
                the passphrase is missing or wrong.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        data, mode = _read_key(path)
        phrase = os.environ.get(PASSPHRASE, "").encode() or None
        if b"PUBLIC KEY-----" in data:
            raise _bad_key(path, "is a public key", "name the private key that was made with it")
        if not stat.S_ISREG(mode) or mode & 0o077:
            fix = f"chmod 600 {path}; if others may have read it, revoke it"
            raise _bad_key(path, f"is readable by others ({stat.filemode(mode)})", fix)
        try:
            private_key = load_pem_private_key(data, phrase)
        except TypeError:
            problem = "is not encrypted" if phrase else "is encrypted"
            raise _bad_key(path, problem, f"set {PASSPHRASE} for encrypted keys alone") from None
        except (ValueError, UnsupportedAlgorithm):
            problem = f"has another passphrase than {PASSPHRASE}" if phrase else "is no PEM key"
            raise _bad_key(path, problem) from None
        return cls(_checked_ed25519(path, private_key))

    def save(self, path: Path) -> Path:
        """Writes the key, readable by its owner alone, and the public key as `<path>.pub`.

        Both are PEM; the private key is encrypted if `SPECCTL_KEY_PASSPHRASE` is set. Returns the
        path of the public key.

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
            fix = "choose another name; an existing key is never replaced"
            if isinstance(error, FileNotFoundError):
                fix = f"make the folder {path.absolute().parent}, or name another place"
            problem = f"key {error.filename or path} cannot be written: {reason_of(error)}"
            raise OutputError(problem, hint=fix) from error
        return public

    def sign(self, payload_type: str, payload: bytes) -> bytes:
        """A DSSE envelope with this key's signature."""
        signature = self.private.sign(pae(payload_type, payload))
        return envelope_bytes(payload_type, payload, (self.key_id, signature))


def load_public(path: Path) -> bytes:
    """The raw public key of a PEM file.

    Raises:
        UsageError: no such file, or another kind of key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data, _ = _read_key(path)
    if b"PRIVATE KEY-----" in data:
        fix = f"name {path}.pub, and keep the private key secret"
        raise _bad_key(path, "is a private key", fix)
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise _bad_key(path, "is no public key in PEM") from None
    raw: bytes = _checked_ed25519(path, key).public_bytes_raw()
    return raw


def _read_key(path: Path) -> tuple[bytes, int]:
    try:
        data, status = read_plain(path, max_bytes=MAX_KEY_FILE_BYTES, follow=True)
    except OSError as error:
        raise _bad_key(path, f"cannot be read: {reason_of(error)}") from None
    return data, status.st_mode


def _checked_ed25519(path: Path, key: Any) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    if not isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
        raise _bad_key(path, "is no Ed25519 key", "make one with `specctl registry keygen`")
    return key


def _bad_key(path: Path, problem: str, fix: str | None = None) -> UsageError:
    known = f"name a file of `specctl registry keygen`; set {PASSPHRASE} if it is encrypted"
    return UsageError(f"key {path} {problem}", hint=fix or known)


# ------------------------------------------------------------------ envelopes


def _decoded(text: object) -> bytes:
    if isinstance(text, bytes):  # never in JSON
        return text
    require(isinstance(text, str), "standard base64")
    data = base64.b64decode(str(text), validate=True)
    require(_encoded(data) == text, "base64 in its one form")  # no stray bits at the end
    return data


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


Base64 = Annotated[bytes, BeforeValidator(_decoded), PlainSerializer(_encoded, when_used="json")]
"""Bytes; standard base64 in JSON."""


class Signature(Record):
    """A key's signature of the pre-authentication encoding, not verified."""

    key_id: Annotated[str, Field(alias="keyid", min_length=1, max_length=128)]
    signature: Annotated[Base64, Field(alias="sig")]


class Envelope(Record):
    """A payload, its media type, and at most one signature."""

    payload: Base64
    payload_type: Annotated[
        str, Field(alias="payloadType", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9.+/_-]{0,127}$")
    ]
    signatures: Annotated[tuple[Signature, ...], Field(max_length=1)]

    @property
    def key_id(self) -> str | None:
        """The key named by the signature; None for an unsigned envelope."""
        return self.signatures[0].key_id if self.signatures else None

    def is_signed_by(self, public_key: bytes) -> bool:
        """Whether the signature names a raw public key and was made with it."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if self.key_id != key_id_of(public_key):
            return False
        [made] = self.signatures
        try:
            key = Ed25519PublicKey.from_public_bytes(public_key)
            key.verify(made.signature, pae(self.payload_type, self.payload))
        except InvalidSignature:
            return False
        return True


def pae(payload_type: str, payload: bytes) -> bytes:
    """The pre-authentication encoding: the bytes that are signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def envelope_bytes(
    payload_type: str, payload: bytes, signature: tuple[str, bytes] | None = None
) -> bytes:
    """An envelope as canonical JSON; `signature` is the key's id and the signature."""
    signed = [] if signature is None else [{"keyid": signature[0], "sig": _encoded(signature[1])}]
    tree = {"payload": _encoded(payload), "payloadType": payload_type, "signatures": signed}
    return canonical_json(tree).encode()


def parse_envelope(data: bytes) -> Envelope:
    """Parses an envelope without verifying its signature.

    E_SIG for anything but strict JSON of the three fields, standard base64 and at most one
    signature.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise bad_signature(f"{len(data)} bytes, more than {MAX_ENVELOPE_BYTES}")
    return parse_signed(data, Envelope, "an envelope: payload, payloadType and signatures")


def parse_signed(data: bytes, record: type[R], form: str) -> R:
    """Parses a record of strict JSON (E_SIG for anything else)."""
    try:
        parse_strict(data)
        return record.model_validate_json(data)
    except ArtifactError as error:
        raise bad_signature(error.problem) from None
    except ValidationError as error:
        raise bad_signature(f"not {form}: {describe_violation(error)}") from None


# ------------------------------------------------------------------ statements


class Sha256(Record):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Subject(Record):
    """A name, and the digest of the manifest that may be used under it."""

    name: Name
    digest: Sha256


class Signing(Record):
    """The time of signing (UTC), and the version of specctl that signed."""

    created: UtcTime
    specctl_version: Name


class Statement(Record):
    """The signed payload."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: Annotated[tuple[Subject, ...], Field(min_length=1, max_length=1)]
    predicate_type: Literal["urn:specctl:artifact:v1"] = Field(alias="predicateType")
    predicate: Signing

    @property
    def about(self) -> tuple[str, str]:
        """The manifest's digest, and the name that it was signed for."""
        [subject] = self.subject
        return f"sha256:{subject.digest.sha256}", subject.name


def sign_artifact(key: SigningKey, manifest_digest: str, name: str) -> bytes:
    """A signed envelope about a manifest, by its digest `sha256:<hex>`, under a name."""
    return key.sign(STATEMENT_TYPE, statement_bytes(manifest_digest, name))


def statement_bytes(manifest_digest: str, name: str) -> bytes:
    """The statement as canonical JSON, dated now."""
    from specctl.version import __version__

    tree = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": manifest_digest.removeprefix("sha256:")}}],
        "predicateType": "urn:specctl:artifact:v1",
        "predicate": {"created": utc_now(), "specctl_version": __version__},
    }
    return canonical_json(tree).encode()


def parse_statement(envelope: bytes) -> Statement:
    """The statement in an envelope (else E_SIG); its signature is not verified."""
    found = parse_envelope(envelope)
    if found.payload_type != STATEMENT_TYPE:
        raise bad_signature(f"the envelope holds {found.payload_type}, not {STATEMENT_TYPE}")
    return parse_signed(found.payload, Statement, "an in-toto statement")


def speaks_of(envelope: bytes, manifest_digest: str, name: str) -> bool:
    """Whether an envelope, verified or not, is about this manifest under this name."""
    try:
        return parse_statement(envelope).about == (manifest_digest, name)
    except ArtifactError:
        return False


def sign_folder(folder: Path, key: SigningKey, name: str) -> str:
    """Signs an artifact under a name, in `signature.dsse.json`; returns the artifact's digest.

    An older signature is replaced.

    Raises:
        ArtifactError: the loader refuses the artifact.
        OutputError: the signature cannot be written.
    """
    from specctl.artifacts.load import load_files  # here: it needs torch

    digest = load_files(read_folder(folder), artifact=str(folder)).digest
    place = folder / SIGNATURE
    with output_errors(place, "signature", WRITABLE):
        replace_file(place, sign_artifact(key, digest, name))
    return digest
