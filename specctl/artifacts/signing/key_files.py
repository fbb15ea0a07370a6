"""Key files: private ones for their owner alone, none ever replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from specctl.durable import sync_folder
from specctl.errors import OutputError, UsageError

PASSPHRASE = "SPECCTL_KEY_PASSPHRASE"
"""Environment variable: encrypts key files where it is set, and decrypts them."""
WRITABLE = "correct permissions or free space, or name another place"
MAX_KEY_FILE_BYTES = 16 << 10
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def read_private(path: Path) -> bytes:
    """The bytes of a private key.

    Raises:
        UsageError: no such file, or one that others can read.
    """
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        raise unusable(path, error.strerror or type(error).__name__) from None
    try:
        _check_mode(path, os.fstat(handle).st_mode)
        return os.read(handle, MAX_KEY_FILE_BYTES)
    finally:
        os.close(handle)


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise UsageError(
            f"key {path}",
            expected="a file that its owner alone can read",
            found=stat.filemode(mode),
            fix=f"chmod 600 {path}; if others could read it for long, revoke it",
        )


def write_key(path: Path, data: bytes, *, mode: int) -> None:
    """Writes a new file with the given permissions.

    Raises:
        OutputError: it exists, or cannot be written.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        sync_folder(path.absolute().parent)
    except OSError as error:
        raise OutputError(
            f"key {path}",
            expected="a new file that can be written",
            found=error.strerror or type(error).__name__,
            fix="choose another name; an existing key is never replaced",
        ) from error


def passphrase() -> bytes | None:
    """What key files are encrypted with; None where the variable is not set."""
    return os.environ.get(PASSPHRASE, "").encode() or None


def unusable(path: Path, found: str, expected: str = "an Ed25519 key, PEM") -> UsageError:
    """The refusal of a file that holds no such key."""
    fix = f"name a file of `specctl registry keygen`; set {PASSPHRASE} if it is encrypted"
    return UsageError(f"key {path}", expected=expected, found=found, fix=fix)
