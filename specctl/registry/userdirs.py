"""The user's folders: settings, and a cache that may be deleted at any time, with its notes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from specctl.artifacts.files import read_plain
from specctl.durable import make_folder, output_errors, replace_file
from specctl.errors import UsageError
from specctl.records import Record, canonical_json

R = TypeVar("R", bound=Record)


def config_home() -> Path:
    """The folder of the user's settings: `$XDG_CONFIG_HOME/specctl` on Linux."""
    return _home("config")


def cache_home() -> Path:
    """The user's cache: `$XDG_CACHE_HOME/specctl` on Linux."""
    return _home("cache")


def make_cache_home() -> None:
    """Makes the cache folder before anything is fetched.

    Raises:
        OutputError: it cannot be written; the message names the variable that chooses another.
    """
    folder = cache_home()
    fix = "correct its permissions, or set XDG_CACHE_HOME to a folder that you can write to"
    with output_errors(folder, "own folder", fix):
        make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def make_private(folder: Path, root: Path) -> None:
    """Makes a folder of the cache; removes others' rights to it and its parents up to `root`."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, *folder.parents):
        if place.lstat().st_mode & 0o077:
            place.chmod(0o700)
        if place == root:
            return


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


def _home(kind: str) -> Path:
    from platformdirs import PlatformDirs  # not needed to serve local policies

    dirs = PlatformDirs("specctl", appauthor=False)
    try:
        return dirs.user_config_path if kind == "config" else dirs.user_cache_path
    except RuntimeError:
        raise UsageError(
            "this account has no home folder", hint=f"set HOME or XDG_{kind.upper()}_HOME"
        ) from None
