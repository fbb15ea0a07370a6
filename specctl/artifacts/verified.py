"""Which artifacts this user has loaded once in isolation: empty files named by digest.

    $XDG_STATE_HOME/specctl/verified/<loader>/<hex of the digest>

A marker only spares the second isolation. Every check of the loader runs in every process anyway.
"""

from __future__ import annotations

import logging
import os
import stat
from importlib.metadata import version
from pathlib import Path

from specctl.artifacts.userdirs import state_home

LOADER_VERSION = 2
"""Raised when the isolated load learns to refuse more: what passed before is then tried again."""
log = logging.getLogger("specctl.artifacts")
_said: set[str] = set()


def is_verified(digest: str) -> bool:
    """Whether this user's own marker of the artifact is there."""
    try:
        found = _marker(digest).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


def mark_verified(digest: str) -> None:
    """Notes that the artifact passed; where that cannot be written, it is said once."""
    marker = _marker(digest)
    try:
        marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker.touch(mode=0o600)
    except OSError as error:
        _say_once(marker.parent, error)


def _say_once(folder: Path, error: OSError) -> None:
    reason = error.strerror or type(error).__name__
    if reason not in _said:
        _said.add(reason)
        log.warning(
            "%s cannot be written (%s): every process loads artifacts in isolation first",
            folder,
            reason,
        )


def _marker(digest: str) -> Path:
    loader = f"{LOADER_VERSION}-{version('specctl')}"
    return state_home() / "verified" / loader / digest.removeprefix("sha256:")
