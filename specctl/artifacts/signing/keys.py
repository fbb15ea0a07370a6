"""Ed25519 keys: made, kept in files that only their owner reads, and put to use.

cryptography is imported where a key is used: a box that only runs unsigned policies needs none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.artifacts.signing.dsse import Signature, envelope_bytes, pae
from specctl.artifacts.signing.key_files import (
    check_ed25519,
    load_private,
    load_public_key,
    passphrase,
    write_key,
)
from specctl.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = "ed25519:"
PUBLIC_KEY_BYTES, SIGNATURE_BYTES = 32, 64


def key_id_of(public_key: bytes) -> str:
    """`ed25519:<sha256 hex>` of a raw public key of 32 bytes."""
    return PREFIX + hashlib.sha256(public_key).hexdigest()


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
        _require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Reads a key that `save` wrote: PEM, PKCS8.

        Raises:
            UsageError: no file, one that others can read, another kind of key, or a passphrase
                that is missing or wrong.
        """
        _require_cryptography()
        key = load_private(path)
        check_ed25519(path, key)
        return cls._of(key)

    def save(self, path: Path) -> None:
        """Writes the key for its owner alone, encrypted where `SPECCTL_KEY_PASSPHRASE` is set.

        Raises:
            OutputError: the file exists, or cannot be written.
        """
        from cryptography.hazmat.primitives import serialization as form

        phrase = passphrase()
        encryption = form.BestAvailableEncryption(phrase) if phrase else form.NoEncryption()
        pem = self.private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, encryption)
        write_key(path, pem, mode=0o600)

    def save_public(self, path: Path) -> None:
        """Writes the public key: PEM, for everybody.

        Raises:
            OutputError: the file exists, or cannot be written.
        """
        from cryptography.hazmat.primitives import serialization as form

        public, kind = self.private.public_key(), form.PublicFormat.SubjectPublicKeyInfo
        write_key(path, public.public_bytes(form.Encoding.PEM, kind), mode=0o644)

    def sign_bytes(self, data: bytes) -> bytes:
        """The signature of some bytes, 64 bytes."""
        return self.private.sign(data)

    def sign(self, payload_type: str, payload: bytes) -> bytes:
        """A DSSE envelope with this key's signature."""
        made = Signature(self.key_id, self.sign_bytes(pae(payload_type, payload)))
        return envelope_bytes(payload_type, payload, [made])

    @classmethod
    def _of(cls, private: Ed25519PrivateKey) -> SigningKey:
        return cls(private, private.public_key().public_bytes_raw())


def load_public(path: Path) -> bytes:
    """The raw public key of a PEM file.

    Raises:
        UsageError: no such file, or another kind of key.
    """
    _require_cryptography()
    key = load_public_key(path)
    check_ed25519(path, key)
    raw: bytes = key.public_bytes_raw()
    return raw


def is_signature(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the owner of a public key signed these bytes.

    Raises:
        UsageError: cryptography is not installed, so nothing can be verified.
    """
    _require_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "signatures",
            expected="the package cryptography",
            found="none",
            fix="pip install cryptography; without it no signature can be made or verified",
        ) from error
