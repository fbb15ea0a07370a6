"""The newest entry that a user saw of each history: a shortened or replaced history is refused.

    histories/<registry_id>/<name>.json    generation and digest, in the user's cache

Notes are kept by registry id, so a copy of a registry must continue the same history.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from pydantic import ValidationError

from specctl.artifacts.files import read_plain
from specctl.artifacts.manifest import Digest
from specctl.artifacts.strict_json import parse_strict
from specctl.durable import output_errors, replace_file
from specctl.errors import ArtifactError, RegistryError
from specctl.records import Record, canonical_json
from specctl.registry.log import LOGS, Generation, Log
from specctl.registry.names import segment_of
from specctl.registry.userdirs import cache_home, make_private

_NOTE_BYTES = 4096


class Newest(Record):
    """Generation and digest of an entry."""

    generation: Generation
    digest: Digest


class Memory:
    """The histories that one user saw.

    Args:
        root: a folder; None for the user's cache.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    def recall(self, registry_id: str, name: str) -> Newest | None:
        """The newest known entry of a history, or None.

        Recall it before reading the history: other processes may add entries meanwhile.
        """
        path = self._path(registry_id, name)
        try:
            data = read_own(path, max_bytes=_NOTE_BYTES)
            parse_strict(data)
            return Newest.model_validate_json(data)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ArtifactError, ValidationError) as error:
            found = error.strerror if isinstance(error, OSError) else "it is malformed"
            problem = f"this note of the newest entry that you saw cannot be used: {found}"
            raise RegistryError("E_LOG", str(path), problem, hint="remove it") from None

    def check(self, newest: Newest | None, log: Log) -> None:
        """Refuses a history that lacks the newest known entry (E_LOG)."""
        if newest is None:
            return
        end = len(log.entries) - 1
        if newest.generation > end:
            found = f"this one ends at generation {end}" if end >= 0 else "it is gone"
        elif log.entries[newest.generation].digest != newest.digest:
            found = "this one has another entry there"
        else:
            return
        raise RegistryError(
            "E_LOG",
            f"{log.store.url}, {LOGS}/{segment_of(log.name)}",
            f"you saw a history up to generation {newest.generation}, but {found}",
            hint="restore the missing entries from a copy of the registry; to accept the loss, "
            f"remove {self._path(log.registry_id, log.name)}",
        )

    def note(self, log: Log) -> None:
        """Remembers the newest entry of a history, unless a newer one is known."""
        end = len(log.entries) - 1
        newest = self.recall(log.registry_id, log.name)
        if end < 0 or (newest is not None and newest.generation >= end):
            return
        path = self._path(log.registry_id, log.name)
        made = Newest(generation=end, digest=log.entries[end].digest)
        with output_errors(path, "cache of histories"):
            make_private(path.parent, self._home())
            replace_file(path, canonical_json(made.model_dump(mode="json")).encode(), mode=0o600)

    def segments(self, registry_id: str) -> set[str]:
        """The key segments of the names whose histories the user saw."""
        return {path.stem for path in (self._home() / "histories" / registry_id).glob("*.json")}

    def _home(self) -> Path:
        return self._root or cache_home()

    def _path(self, registry_id: str, name: str) -> Path:
        return self._home() / "histories" / registry_id / f"{segment_of(name)}.json"


def read_own(path: Path, *, max_bytes: int) -> bytes:
    """Bytes of a note in the cache; OSError if it is absent, too long, a link, another user's or
    writable by others."""
    data, status = read_plain(path, max_bytes=max_bytes)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write to it")
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes")
    return data
