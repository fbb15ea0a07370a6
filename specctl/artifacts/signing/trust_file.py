"""The user's own trust record, `$XDG_CONFIG_HOME/specctl/trust.json`, and changes to it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specctl.artifacts.manifest import utc_now
from specctl.artifacts.signing.key_files import WRITABLE
from specctl.artifacts.signing.records import (
    NOBODY,
    Revocation,
    TrustedKey,
    TrustRecord,
    is_glob,
    parse_trust,
    trust_bytes,
)
from specctl.artifacts.userdirs import config_home
from specctl.durable import make_folder, output_errors, replace_file
from specctl.errors import UsageError
from specctl.plain_text import shown

MAX_TRUST_BYTES = 1 << 20
_OTHERS_CAN_WRITE = 0o022


def trust_path() -> Path:
    """Where the user's trust record stands: in `$XDG_CONFIG_HOME`, else in `~/.config`."""
    return config_home() / "trust.json"


def read_trust(path: Path | None = None) -> TrustRecord:
    """A trust file; the user's own may be missing, which is to believe nobody.

    Raises:
        UsageError: a file that was named and is missing, that cannot be read, or that others may
            write: they would decide whom this user believes.
        ArtifactError: E_SCHEMA for another form.
    """
    place = trust_path() if path is None else path
    try:
        # A pipe must not be waited for.
        with os.fdopen(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_mode(place, os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_TRUST_BYTES)
    except OSError as error:
        if path is None and isinstance(error, FileNotFoundError):
            return NOBODY
        raise UsageError(
            f"trust file {place}",
            expected="a file that can be read",
            found=error.strerror or type(error).__name__,
            fix="check the path; `specctl registry trust add` makes one",
        ) from error
    return parse_trust(data, f"trust file {place}")


def _check_mode(place: Path, mode: int) -> None:
    if not stat.S_ISREG(mode) or mode & _OTHERS_CAN_WRITE:
        raise UsageError(
            f"trust file {place}",
            expected="a file that its owner alone can write",
            found=stat.filemode(mode),
            fix=f"look at what it says, then chmod go-w {place}",
        )


@dataclass
class TrustEdit:
    """A trust record that is being changed; what `record` is in the end is written."""

    record: TrustRecord

    def add(self, key: TrustedKey) -> None:
        """Trusts a key; one that is there already gets these names, roles and times.

        Raises:
            UsageError: the key was revoked, which is for good.
        """
        known = self.record.key(key.key_id)
        if known is not None and known.revoked is not None:
            raise UsageError(
                f"key {key.key_id}",
                expected="a key that is not revoked",
                found=f"one revoked {known.revoked.at}",
                fix="make a new key: specctl registry keygen",
            )
        others = tuple(one for one in self.record.keys if one.key_id != key.key_id)
        self._set(keys=(*others, key))

    def revoke(self, key_id: str, reason: str) -> None:
        """Never believes a key again; it stays listed, so that nobody adds it anew."""
        revocation = Revocation(at=utc_now(), reason=shown(reason)[:256])
        revoked = self._known(key_id).model_copy(update={"revoked": revocation})
        keys = tuple(revoked if key.key_id == key_id else key for key in self.record.keys)
        self._set(keys=keys)

    def remove(self, key_id: str) -> None:
        """Forgets a key; a registry whose root we trust may still delegate to it."""
        self._known(key_id)
        self._set(keys=tuple(key for key in self.record.keys if key.key_id != key_id))

    def require(self, glob: str) -> None:
        """Asks for signatures under the names that a glob covers.

        Raises:
            UsageError: a glob that covers no name.
        """
        if not is_glob(glob):
            raise UsageError(
                "names", expected="[a-z0-9._+@:-] and *", found=ascii(glob)[:80], fix="correct it"
            )
        self._set(require=tuple(dict.fromkeys((*self.record.require, glob))))

    def _known(self, key_id: str) -> TrustedKey:
        key = self.record.key(key_id)
        if key is None:
            listed = ", ".join(one.key_id[:20] for one in self.record.keys)
            raise UsageError(
                "key", expected=listed or "a listed key", found=key_id, fix="registry trust list"
            )
        return key

    def _set(self, **changed: object) -> None:
        tree = dict(iter(self.record)) | changed  # `keys` is a field: a plain dict() would call it
        self.record = TrustRecord.model_validate(tree)


@contextmanager
def edit_trust(path: Path | None = None) -> Iterator[TrustEdit]:
    """Changes a trust file whole or not at all, one process at a time.

    Raises:
        OutputError: it cannot be written.
        ArtifactError: E_SCHEMA for a file of another form.
    """
    place = trust_path() if path is None else path
    with output_errors(place, "trust file", WRITABLE):
        make_folder(place.absolute().parent)
        lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        edit = TrustEdit(read_trust(place) if place.exists() else NOBODY)
        yield edit
        with output_errors(place, "trust file", WRITABLE):
            # For its owner alone to write, whatever the umask says.
            replace_file(place, trust_bytes(edit.record) + b"\n", mode=0o644)
    finally:
        os.close(lock)
