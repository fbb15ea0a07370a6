"""Where segments of a bucket are prepared: local, private, and gone with its process."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from specctl.collect.cache import cache_folder
from specctl.durable import lock_folder, make_folder, output_errors
from specctl.errors import OutputError

YOUNG_S = 60.0
"""A folder so young may not be locked yet by the process that made it."""


class Spool:
    """A folder of this process alone, locked for as long as it lives.

    Opening one removes those of processes that were killed.

    Raises:
        OutputError: the cache folder cannot be written.
    """

    def __init__(self) -> None:
        base = cache_folder() / "spool"
        with output_errors(base, "cache folder"):
            make_folder(base)
            _clear(base)
            self.folder = Path(tempfile.mkdtemp(dir=base))
        self._lock = -1
        with suppress(OSError):  # a file system without locks, on which nobody clears either
            self._lock = lock_folder(self.folder)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def _clear(base: Path) -> None:
    for folder in base.iterdir():
        with suppress(OSError, OutputError):  # gone already, or of a process that lives
            if time.time() - folder.stat().st_mtime > YOUNG_S:
                lock = lock_folder(folder)
                try:
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
