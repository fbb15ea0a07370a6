"""Folders of the user, as the XDG base directory specification names them."""

from __future__ import annotations

import os
from pathlib import Path


def config_home() -> Path:
    """What the user decided: `$XDG_CONFIG_HOME/specctl`."""
    return _home("XDG_CONFIG_HOME", ".config")


def state_home() -> Path:
    """What must outlive a restart: `$XDG_STATE_HOME/specctl`."""
    return _home("XDG_STATE_HOME", ".local/state")


def cache_home() -> Path:
    """What may be removed at any time: `$XDG_CACHE_HOME/specctl`."""
    return _home("XDG_CACHE_HOME", ".cache")


def _home(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # The specification has relative paths ignored.
    base = Path(given) if os.path.isabs(given) else Path.home() / default
    return base / "specctl"
