"""A file of the user's that somebody else may have put there: opened once, judged by its handle."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from specctl.durable import open_unfollowed


def read_plain(path: Path, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """The bytes of a regular file, and its status. Links, pipes and devices are not opened.

    Args:
        max_bytes: of a longer file one byte more than this is returned.

    Raises:
        OSError: it is not there, cannot be read, or is no regular file (ELOOP, EINVAL).
    """
    handle = open_unfollowed(path)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"not a regular file, {stat.filemode(status.st_mode)}")
        return file.read(max_bytes + 1), status
