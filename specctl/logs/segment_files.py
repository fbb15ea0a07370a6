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
from specctl.errors import TraceCorruptError
from specctl.logs.trace_files import MAX_SEGMENT_BYTES, Place
from specctl.stores import KeyAbsentError
from specctl.stores.creating import read
from specctl.stores.interface import ObjectTooLargeError, UnreadableError

MAX_CACHE_BYTES = 32 << 30
"""Of copies besides those in use; the oldest go first."""
IN_USE_S = 24 * 3600.0
"""After this time no process still reads what it opened."""
PARALLEL_FETCHES = 4
_TEMPORARY = "tmp-"


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/specctl`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "specctl"


def local_file(
    place: Place,
    key: str,
    hex_digest: str,
    size_bytes: int | None = None,
    *,
    verify: bool = True,
    fresh: bool = False,
) -> Path:
    """A local file with the bytes that a key should hold.

    Args:
        hex_digest: SHA-256 of them. size_bytes: their number, where it is known.
        verify: digest them; else only their presence and number is checked.
        fresh: read a bucket's object again, whatever copy there is.

    Raises:
        TraceCorruptError: missing, truncated, altered, a link, or beyond what the disk can read.
        StoreError: the bucket cannot be reached, or the file is not ours to read.
        OutputError: the cache cannot be written.
    """
    if place.root is None:
        return _copy(place, key, hex_digest, size_bytes, verify=verify, fresh=fresh)
    path = place.root / key
    try:
        if path.is_symlink() or path.parent.is_symlink():
            raise _damaged(str(path), "a file of the set's own", "a link")
        found = path.stat().st_size
        if size_bytes is not None and found != size_bytes:
            raise _damaged(str(path), f"{size_bytes} bytes", f"{found} bytes")
        if verify and file_sha256(path) != hex_digest:
            raise _damaged(str(path), f"sha256 {hex_digest[:12]}…", "other bytes")
    except FileNotFoundError:
        raise _damaged(str(path), "the file", "none") from None
    except PermissionError as error:  # no damage, so it must not be called that
        raise UnreadableError(
            str(path), expected="a file that can be read", found=str(error.strerror), fix=READ_AGAIN
        ) from error
    except OSError as error:
        found_error = error.strerror or type(error).__name__
        raise _damaged(str(path), "a file that can be read", found_error) from error
    return path


def fetch_all(place: Place, files: Iterable[tuple[str, str]]) -> None:
    """Brings copies of a bucket's objects here, several at a time; a folder needs none.

    What cannot be brought is left to `local_file`, which says why.

    Args:
        files: keys and hex digests.
    """
    if place.root is not None:
        return

    def fetch(file: tuple[str, str]) -> None:
        with suppress(TraceCorruptError):
            _copy(place, *file, None, verify=True, fresh=False)

    with ThreadPoolExecutor(PARALLEL_FETCHES) as pool:
        list(pool.map(fetch, files))


def _damaged(where: str, expected: str, found: str) -> TraceCorruptError:
    return TraceCorruptError(
        where,
        expected=expected,
        found=found,
        fix="restore the file, or read the rest with --skip-damaged",
    )


def _copy(
    place: Place, key: str, hex_digest: str, size_bytes: int | None, *, verify: bool, fresh: bool
) -> Path:
    folder = cache_folder() / "segments"
    path = folder / f"{hex_digest}.parquet"
    with output_errors(folder, "cache folder"):
        if not fresh and _is_whole(path, hex_digest, verify=verify):
            return path
        where = place.at(key)
        try:
            content = read(place.store, key, max_bytes=size_bytes or MAX_SEGMENT_BYTES)
        except KeyAbsentError:
            raise _damaged(where, "the object", "none") from None
        except ObjectTooLargeError as error:
            raise _damaged(where, error.expected, "more") from None
        if hashlib.sha256(content).hexdigest() != hex_digest:
            raise _damaged(where, f"sha256 {hex_digest[:12]}…", f"{len(content)} other bytes")
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


def _is_whole(path: Path, hex_digest: str, *, verify: bool) -> bool:
    """Whether a copy is there; one that rotted is removed, as the bucket has the original."""
    if not path.is_file():
        return False
    if verify and file_sha256(path) != hex_digest:
        path.unlink(missing_ok=True)
        return False
    os.utime(path)
    return True


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
