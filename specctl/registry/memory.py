"""The newest entry that a user saw of each history: a shortened or replaced history is refused.

    histories/<registry_id>/<name>.json    generation and digest, in the user's cache

Notes are kept by registry id, so a copy of a registry must continue the same history.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from specctl.artifacts.files import read_plain
from specctl.artifacts.manifest import Digest
from specctl.durable import output_errors, replace_file
from specctl.errors import RegistryError
from specctl.records import Record, canonical_json
from specctl.registry.log import LOGS, Generation, Log
from specctl.registry.names import segment_of
from specctl.registry.userdirs import cache_home, make_private

_NOTE_BYTES = 4096
R = TypeVar("R", bound=Record)


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
            return read_note(path, Newest, max_bytes=_NOTE_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            problem = f"this note of the newest entry that you saw cannot be used: {error.strerror}"
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
        made = Newest(generation=end, digest=log.entries[end].digest)
        write_note(self._path(log.registry_id, log.name), made, self._home())

    def segments(self, registry_id: str) -> set[str]:
        """The key segments of the names whose histories the user saw."""
        return {path.stem for path in (self._home() / "histories" / registry_id).glob("*.json")}

    def _home(self) -> Path:
        return self._root or cache_home()

    def _path(self, registry_id: str, name: str) -> Path:
        return self._home() / "histories" / registry_id / f"{segment_of(name)}.json"


def read_note(path: Path, record: type[R], *, max_bytes: int) -> R:
    """A record in the user's cache; OSError if the file is absent, too long, malformed, a link,
    another user's or writable by others."""
    data, status = read_plain(path, max_bytes=max_bytes)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write to it")
    try:
        return record.model_validate_json(data[:max_bytes])
    except ValidationError:
        raise OSError(errno.EINVAL, "it is malformed") from None


def write_note(path: Path, record: Record, root: Path) -> None:
    """Writes or replaces a record in a private folder of the cache `root`."""
    with output_errors(path, "cache"):
        make_private(path.parent, root)
        replace_file(path, canonical_json(record.model_dump(mode="json")).encode(), mode=0o600)
