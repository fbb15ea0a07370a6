"""Results on disk: the place is checked before minutes of work, files are whole or not there."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from specctl.durable import beside, write_new
from specctl.errors import OutputError
from specctl.runtime.jsonable import finite


def json_bytes(value: Any) -> bytes:
    """JSON for people and scripts; NaN, which JSON lacks, is null."""
    return (json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n").encode()


def prepare_folder(folder: Path, what: str = "results folder") -> None:
    """Creates a folder, where it is missing, and tries whether it can be written to.

    Raises:
        OutputError: it cannot.
    """
    probe = beside(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise _unwritable(f"{what} {folder}", "a folder", error) from error


def check_place(path: Path, what: str) -> None:
    """Refuses a file that cannot be written, before minutes are spent on its content.

    Raises:
        OutputError: no such folder, no permission, or a folder in the file's place.
    """
    probe = beside(path)
    try:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise _unwritable(f"{what} {path}", "a file", error) from error


def write_whole(path: Path, content: bytes, what: str) -> None:
    """Writes a file whole or not at all; an older one is replaced.

    Raises:
        OutputError: a place that cannot be written.
    """
    staged = beside(path)
    try:
        write_new(staged, content)
        staged.replace(path)
    except OSError as error:
        raise _unwritable(f"{what} {path}", "a file", error) from error
    finally:
        staged.unlink(missing_ok=True)


def _unwritable(what: str, kind: str, error: OSError) -> OutputError:
    return OutputError(
        what,
        expected=f"{kind} that can be written",
        found=error.strerror or type(error).__name__,
        fix="choose another --out",
    )
