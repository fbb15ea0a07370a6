"""Results on disk: places are checked before minutes of work, and files are written whole."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl.durable import beside, write_new
from specctl.errors import OutputError, reason_of


def finite(value: Any) -> Any:
    """The value with NaN and infinities as None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_bytes(value: Any) -> bytes:
    """Indented JSON; NaN and infinities, which JSON lacks, are null."""
    return (json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n").encode()


def prepare_folder(folder: Path, what: str = "results folder") -> None:
    """Creates a folder if it is missing and checks that it can be written."""
    with _refusing(f"{what} {folder}", "a folder"):
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder / "probe")


def check_place(path: Path, what: str) -> None:
    """Rejects a file that cannot be written."""
    with _refusing(f"{what} {path}", "a file"):
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        _probe(path)


def write_whole(path: Path, content: bytes, what: str) -> None:
    """Writes or replaces a file, whole or not at all."""
    staged = beside(path)
    with _refusing(f"{what} {path}", "a file"):
        try:
            write_new(staged, content)
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)


def _probe(path: Path) -> None:
    probe = beside(path)
    probe.touch(exist_ok=False)
    probe.unlink()


@contextmanager
def _refusing(what: str, kind: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{what} cannot be written as {kind}: {reason_of(error)}", hint="choose another --out"
        ) from error
