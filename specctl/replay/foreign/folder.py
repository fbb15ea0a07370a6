"""A folder that is either whole and on disk, or not there. POSIX only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from specctl.artifacts.files import write_folder
from specctl.durable import beside, sync_folder
from specctl.errors import OutputError

T = TypeVar("T")


def refuse_used(folder: Path) -> None:
    """Raises `OutputError` unless the place is new or an empty folder."""
    try:
        used = os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if used:
        raise OutputError(
            f"import folder {folder}",
            expected="a new place or an empty folder",
            found="something else",
            fix="choose another output folder; nothing was touched",
        )


def publish_new(folder: Path, contents: Mapping[str, bytes], verify: Callable[[Path], T]) -> T:
    """Writes a folder beside its place, verifies it there, then renames it into place.

    Args:
        verify: called on the written folder; what it raises stops the publication.

    Raises:
        OutputError: a place that cannot be written, or that is in use.
    """
    refuse_used(folder)
    staged = beside(folder)
    try:
        write_folder(staged, contents)
        verified = verify(staged)
        staged.rename(folder)  # onto an empty folder, rename(2) replaces it
        sync_folder(folder.parent)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(staged)
    return verified


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"import folder {folder}",
        expected="a place that can be written",
        found=error.strerror or type(error).__name__,
        fix="choose another output folder",
    )
