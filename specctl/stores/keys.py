"""Keys: paths that no store and no file system reads in two ways."""

from __future__ import annotations

import re

from specctl.errors import InvariantError

_KEY = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]{0,254}")
MAX_KEY_BYTES = 900
"""S3 takes 1,024 bytes, of which the prefix of a URL has some."""


def check_key(key: str) -> str:
    """Returns a key of plain segments.

    Raises:
        InvariantError: any other. Callers build keys from checked names, never from a stranger's.
    """
    segments = key.split("/")
    if len(key) > MAX_KEY_BYTES or not all(_KEY.fullmatch(segment) for segment in segments):
        raise InvariantError(
            "store key",
            expected=f"segments [A-Za-z0-9._@+=-], at most {MAX_KEY_BYTES} bytes",
            found=ascii(key)[:80],
            fix="report this",
        )
    return key
