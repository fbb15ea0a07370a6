"""The newest entry that a user saw of each history, so that a shorter or another one is refused.

    histories/<registry_id>/<name>.json    generation and digest, in the user's cache

It goes by the identity of a registry, so that a copy in another place is held to the same history.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NoReturn

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
_OTHERS_CAN_WRITE = 0o022


class Seen(Record):
    """An entry by its place and its bytes."""

    generation: Generation
    digest: Digest


class Memory:
    """Histories as one user saw them last.

    Args:
        root: a folder; None is the user's own cache.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    def recall(self, registry_id: str, name: str) -> Seen | None:
        """The newest entry that was seen of a history; None where none was.

        To be asked before the history is read, which other processes write on meanwhile.
        """
        path = self._path(registry_id, name)
        try:
            data = read_own(path, max_bytes=_NOTE_BYTES)
            parse_strict(data)
            return Seen.model_validate_json(data)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ArtifactError, ValidationError) as error:
            found = error.strerror if isinstance(error, OSError) else "a note of another form"
            _refuse(
                str(path),
                f"expected a note of the newest entry that you saw, found {found or 'none'}",
                "remove it",
            )

    def check(self, seen: Seen | None, log: Log) -> None:
        """Refuses a history without the entry that was seen (E_LOG)."""
        if seen is None:
            return
        end = len(log.entries) - 1
        if seen.generation > end:
            found = f"one that ends at generation {end}" if end >= 0 else "no history"
        elif log.entries[seen.generation].digest != seen.digest:
            found = f"another generation {seen.generation}"
        else:
            return
        path = self._path(log.registry.marker.registry_id, log.name)
        _refuse(
            f"{log.registry.url}, {LOGS}/{segment_of(log.name)}",
            f"expected the history that you saw up to generation {seen.generation}, found {found}",
            "restore the missing entries from a copy of the registry; to accept the loss, remove "
            f"{path}",
        )

    def note(self, log: Log) -> None:
        """Remembers the newest entry of a history, unless a newer one was seen."""
        registry_id, end = log.registry.marker.registry_id, len(log.entries) - 1
        seen = self.recall(registry_id, log.name)
        if end < 0 or (seen is not None and seen.generation >= end):
            return
        path = self._path(registry_id, log.name)
        made = Seen(generation=end, digest=log.entries[end].digest)
        with output_errors(path, "cache of histories"):
            make_private(path.parent, self._home())
            replace_file(path, canonical_json(made.model_dump(mode="json")).encode(), mode=0o600)

    def segments(self, registry_id: str) -> set[str]:
        """The key segments of the names that were seen."""
        return {path.stem for path in (self._home() / "histories" / registry_id).glob("*.json")}

    def _home(self) -> Path:
        return self._root or cache_home()

    def _path(self, registry_id: str, name: str) -> Path:
        return self._home() / "histories" / registry_id / f"{segment_of(name)}.json"


def read_own(path: Path, *, max_bytes: int) -> bytes:
    """The bytes of a note in the cache.

    Raises:
        OSError: it is absent, a link, of another user, writable by others, or too long.
    """
    data, status = read_plain(path, max_bytes=max_bytes)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & _OTHERS_CAN_WRITE:
        raise PermissionError(errno.EPERM, "a note that others could write")
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes")
    return data


def _refuse(place: str, problem: str, fix: str) -> NoReturn:
    raise RegistryError("E_LOG", place, problem, hint=fix)
