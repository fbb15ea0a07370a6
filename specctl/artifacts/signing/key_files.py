"""Key files: private ones for their owner alone, none ever replaced."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from specctl.durable import sync_folder, write_new
from specctl.errors import OutputError, UsageError

PASSPHRASE = "SPECCTL_KEY_PASSPHRASE"
"""Environment variable: encrypts key files where it is set, and decrypts them."""
WRITABLE = "correct permissions or free space, or name another place"
MAX_KEY_FILE_BYTES = 16 << 10
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def load_private(path: Path) -> Any:
    """The private key of a PEM file, a key of cryptography's, of whatever kind.

    Raises:
        UsageError: no such file, one that others can read, no private key, or a passphrase that
            is missing or wrong.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data, phrase = _read_private(path), passphrase()
    is_encrypted = b"ENCRYPTED" in data
    if is_encrypted != (phrase is not None):
        raise _unlike_passphrase(path, is_encrypted=is_encrypted)
    try:
        return load_pem_private_key(data, phrase)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        if is_encrypted:
            raise _wrong_passphrase(path, "another one") from None
        raise unusable(path, "something else", "a private key, PEM") from None


def load_public_key(path: Path) -> Any:
    """The public key of a PEM file, a key of cryptography's, of whatever kind.

    Raises:
        UsageError: no such file, or no public key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise _unread(path, error) from None
    if b"PRIVATE KEY-----" in data:
        raise UsageError(
            f"key {path}",
            expected="a public key",
            found="a private key",
            fix=f"name {path}.pub, and show the private key to nobody",
        )
    try:
        return load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise unusable(path, "something else", "a public key, PEM") from None


def check_ed25519(path: Path, key: object) -> None:
    """Refuses a key of another kind.

    Raises:
        UsageError: it is of another one.
    """
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


def _read_private(path: Path) -> bytes:
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        raise _unread(path, error) from None
    try:
        mode = os.fstat(handle).st_mode
        data = os.read(handle, MAX_KEY_FILE_BYTES) if stat.S_ISREG(mode) else b""
    finally:
        os.close(handle)
    if b"PUBLIC KEY-----" in data:
        raise _is_public(path)
    _check_mode(path, mode)
    return data


def _is_public(path: Path) -> UsageError:
    private = path.with_suffix("") if path.suffix == ".pub" else "the one that it was made with"
    return UsageError(
        f"key {path}", expected="a private key", found="a public key", fix=f"name {private}"
    )


def _unread(path: Path, error: OSError) -> UsageError:
    return unusable(path, error.strerror or type(error).__name__, "a file that can be read")


def _unlike_passphrase(path: Path, *, is_encrypted: bool) -> UsageError:
    if is_encrypted:
        return _wrong_passphrase(path, "none")
    return UsageError(
        f"key {path}",
        expected=f"an encrypted key, as {PASSPHRASE} is set",
        found="one that is not encrypted",
        fix=f"unset {PASSPHRASE} for this key",
    )


def _wrong_passphrase(path: Path, found: str) -> UsageError:
    return UsageError(
        f"key {path}",
        expected=f"the passphrase of the key, in {PASSPHRASE}",
        found=found,
        fix=f"set {PASSPHRASE} to it",
    )


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise UsageError(
            f"key {path}",
            expected="a file that its owner alone can read",
            found=stat.filemode(mode),
            fix=f"chmod 600 {path}; if others could read it for long, revoke it",
        )


def check_absent(*paths: Path) -> None:
    """Refuses a pair one half of which is there, before the other is written.

    Raises:
        OutputError: naming the file.
    """
    for path in paths:
        if os.path.lexists(path):
            raise _unwritten(path, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))


def write_key(path: Path, data: bytes, *, mode: int) -> None:
    """Writes a new file with the given permissions.

    Raises:
        OutputError: it exists, or cannot be written.
    """
    try:
        write_new(path, data, mode=mode)
        sync_folder(path.absolute().parent)
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: OSError) -> OutputError:
    folder = path.absolute().parent
    expected, found = "a new file that can be written", error.strerror or type(error).__name__
    fix = "choose another name; an existing key is never replaced"
    if isinstance(error, FileNotFoundError):
        expected, found, fix = f"the folder {folder}", "none", "make it, or name another place"
    return OutputError(f"key {path}", expected=expected, found=found, fix=fix)


def passphrase() -> bytes | None:
    """What key files are encrypted with; None where the variable is not set."""
    return os.environ.get(PASSPHRASE, "").encode() or None


def unusable(path: Path, found: str, expected: str) -> UsageError:
    """The refusal of a file that holds no such key."""
    fix = f"name a file of `specctl registry keygen`; set {PASSPHRASE} if it is encrypted"
    return UsageError(f"key {path}", expected=expected, found=found, fix=fix)
