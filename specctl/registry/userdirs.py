"""Folders of the user, as the XDG base directory specification names them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from specctl.durable import make_folder, output_errors
from specctl.errors import UsageError


def config_home() -> Path:
    """The folder of the user's settings: `$XDG_CONFIG_HOME/specctl`."""
    return _home("XDG_CONFIG_HOME", ".config")


def cache_home() -> Path:
    """The cache, which may be removed at any time: `$XDG_CACHE_HOME/specctl`."""
    return _home("XDG_CACHE_HOME", ".cache")


def make_cache_home() -> None:
    """Makes the folder that keeps pulled artifacts, before anything is fetched.

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
    """Makes a folder of the cache, and closes those on the way that are open to others."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, *folder.parents):
        if place.lstat().st_mode & 0o077:
            place.chmod(0o700)
        if place == root:
            return


def _home(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    if os.path.isabs(given):  # the specification has relative paths ignored
        return Path(given) / "specctl"
    try:
        return Path.home() / default / "specctl"
    except RuntimeError:
        raise UsageError(
            "HOME: expected the home of an account, found none, as the account has no name",
            hint=f"set HOME, or {variable} to a folder of its own",
        ) from None
