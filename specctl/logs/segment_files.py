"""The local file of a segment, checked: a folder's own, or a private copy of a bucket's object.

Every file of a set is named by the SHA-256 of its bytes, so its name finds and checks a copy.
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
"""Of copies besides those in use; the oldest go first."""
IN_USE_S = 24 * 3600.0
"""After this time no process still reads what it opened."""
PARALLEL_FETCHES = 4
_TEMPORARY = "tmp-"


def local_file(place: Place, file: StoredFile, *, verify: bool = True, fresh: bool = False) -> Path:
    """A local file with the bytes that a key should hold.

    Args:
        verify: digest them; else only their presence and number is checked.
        fresh: read a bucket's object again, whatever copy there is.
    """
    if place.root is None:
        return _copy(place, file, verify=verify, fresh=fresh)
    path = place.root / file.key
    try:
        if path.is_symlink() or path.parent.is_symlink():
            raise _damaged(str(path), "expected a file of the set's own, found a link")
        found = path.stat().st_size
        if file.size_bytes is not None and found != file.size_bytes:
            raise _damaged(str(path), f"expected {file.size_bytes} bytes, found {found} bytes")
        if verify and file_sha256(path) != file.sha256:
            raise _damaged(str(path), f"expected sha256 {file.sha256[:12]}…, found other bytes")
    except FileNotFoundError:
        raise _damaged(str(path), "expected the file, found none") from None
    except PermissionError as error:  # no damage, so it must not be called that
        raise UnreadableError(
            f"{path}: expected a file that can be read, found {reason_of(error)}", hint=READ_AGAIN
        ) from error
    except OSError as error:
        found_error = reason_of(error)
        raise _damaged(
            str(path), f"expected a file that can be read, found {found_error}"
        ) from error
    return path


def fetch_all(place: Place, files: Iterable[StoredFile]) -> None:
    """Brings copies of a bucket's objects here, several at a time; a folder needs none.

    What cannot be brought is left to `local_file`, which says why.
    """
    if place.root is not None:
        return

    def fetch(file: StoredFile) -> None:
        with suppress(TraceCorruptError):
            _copy(place, file, verify=True, fresh=False)

    with ThreadPoolExecutor(PARALLEL_FETCHES) as pool:
        list(pool.map(fetch, files))


def _damaged(where: str, problem: str) -> TraceCorruptError:
    return TraceCorruptError(
        f"{where}: {problem}",
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
            path.unlink(missing_ok=True)  # it rotted; the bucket has the original
        try:
            content = read(place.store, file.key, max_bytes=file.size_bytes or MAX_SEGMENT_BYTES)
        except KeyAbsentError:
            raise _damaged(where, "expected the object, found none") from None
        except ObjectTooLargeError:
            raise _damaged(where, "more bytes than a segment may have") from None
        if hashlib.sha256(content).hexdigest() != file.sha256:
            found = f"{len(content)} other bytes"
            raise _damaged(where, f"expected sha256 {file.sha256[:12]}…, found {found}")
        make_folder(folder)
        folder.chmod(0o700)  # for its owner alone: the bucket may be as private
        _trim(folder)
        temporary = folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            write_new(temporary, content, mode=0o600)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _trim(folder: Path) -> None:
    """Removes unfinished copies of processes that died, and the oldest ones beyond the cap."""
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
