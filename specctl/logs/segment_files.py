"""The local file of a segment, checked: one of the folder, or a private copy of a bucket's object.

Files are named by the SHA-256 of their bytes, so the name finds and checks a copy.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from specctl.durable import (
    READ_AGAIN,
    file_sha256,
    make_folder,
    output_errors,
    publish,
    write_new,
)
from specctl.errors import TraceCorruptError, reason_of
from specctl.logs.trace_files import MAX_SEGMENT_BYTES, Place, StoredFile
from specctl.registry.userdirs import cache_home
from specctl.stores import KeyAbsentError
from specctl.stores.creating import read
from specctl.stores.interface import ObjectTooLargeError, UnreadableError

MAX_CACHE_BYTES = 32 << 30
"""Limit on copies besides those in use; the oldest go first."""
IN_USE_S = 24 * 3600.0
"""Time after which no process still reads a copy."""
PARALLEL_FETCHES = 4
_TEMPORARY = "tmp-"


def local_file(place: Place, file: StoredFile, *, verify: bool = True, fresh: bool = False) -> Path:
    """A local file with the bytes of a key.

    Args:
        verify: digest them; else check presence and size.
        fresh: fetch a bucket's object again, in place of a local copy.
    """
    if place.root is None:
        return _copy(place, file, verify=verify, fresh=fresh)
    path = place.root / file.key
    try:
        if path.is_symlink() or path.parent.is_symlink():
            raise _damaged(f"{path} is a link")
        found = path.stat().st_size
        if file.size_bytes is not None and found != file.size_bytes:
            raise _damaged(f"{path} has {found} bytes of {file.size_bytes}")
        if verify and file_sha256(path) != file.sha256:
            raise _damaged(f"{path} was altered: its digest is not {file.sha256[:12]}…")
    except FileNotFoundError:
        raise _damaged(f"{path} is missing") from None
    except PermissionError as error:  # no damage
        raise UnreadableError(
            f"{path} cannot be read: {reason_of(error)}", hint=READ_AGAIN
        ) from error
    except OSError as error:
        raise _damaged(f"{path} cannot be read: {reason_of(error)}") from error
    return path


def fetch_all(place: Place, files: Iterable[StoredFile]) -> None:
    """Copies a bucket's objects here, several at a time; `local_file` reports failures."""
    if place.root is not None:
        return

    def fetch(file: StoredFile) -> None:
        with suppress(TraceCorruptError):
            _copy(place, file, verify=True, fresh=False)

    with ThreadPoolExecutor(PARALLEL_FETCHES) as pool:
        list(pool.map(fetch, files))


def _damaged(problem: str) -> TraceCorruptError:
    return TraceCorruptError(
        problem,
        hint=(
            "restore the file, or name the snapshot of the rest that `specctl traces snapshot "
            "TRACES --skip-damaged` takes"
        ),
    )


def _copy(place: Place, file: StoredFile, *, verify: bool, fresh: bool) -> Path:
    folder = cache_home() / "segments"
    path, where = folder / f"{file.sha256}.parquet", place.at(file.key)
    with output_errors(folder, "cache folder"):
        if path.is_file() and not fresh:
            if not verify or file_sha256(path) == file.sha256:
                os.utime(path)
                return path
            path.unlink(missing_ok=True)  # altered; the bucket has the original
        try:
            content = read(place.store, file.key, max_bytes=file.size_bytes or MAX_SEGMENT_BYTES)
        except KeyAbsentError:
            raise _damaged(f"{where} is missing") from None
        except ObjectTooLargeError:
            raise _damaged(f"{where} has more bytes than a segment may have") from None
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise _damaged(f"{where} was altered: its digest is not {file.sha256[:12]}…")
        make_folder(folder)
        folder.chmod(0o700)  # for its owner alone, as the bucket may be private
        _trim(folder)
        temporary = folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            write_new(temporary, content, mode=0o600)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _trim(folder: Path) -> None:
    """Removes unfinished copies of dead processes, and the oldest copies beyond the limit."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        with suppress(FileNotFoundError):  # another process has just removed it
            if time.time() - path.stat().st_mtime > IN_USE_S:
                path.unlink()
    found = [(path, path.stat()) for path in folder.glob("*.parquet")]
    unused = [one for one in found if time.time() - one[1].st_mtime > IN_USE_S]
    excess = sum(status.st_size for _, status in unused) - MAX_CACHE_BYTES
    for path, status in sorted(unused, key=lambda one: one[1].st_mtime):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= status.st_size
