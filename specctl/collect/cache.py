"""Local copies of segments that live in a bucket, named by their digest.

A copy has its name only after its digest was checked and a child process read all of it, so what
stands here can be opened like a segment of one's own.
"""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.collect.commits import Segment, check_file, damaged
from specctl.durable import make_folder, output_errors, publish, write_new
from specctl.errors import TraceCorruptError
from specctl.stores import KeyAbsentError
from specctl.stores.creating import read
from specctl.stores.interface import ObjectTooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specctl.collect.places import Place

MAX_CACHE_BYTES = 32 << 30
"""What copies of earlier sets may occupy besides those in use; the oldest go first."""
PARALLEL_FETCHES = 4


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/specctl`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "specctl"


def cached_path(segment: Segment) -> Path:
    """Where the copy of a segment is, or would be."""
    hexdigest = segment.sha256.removeprefix("sha256:")
    return cache_folder() / "segments" / f"{segment.table}-{hexdigest}.parquet"


def fetched(place: Place, segment: Segment) -> Path:
    """The copy of one segment, brought here if it is not; see `fetch_all`."""
    path = cached_path(segment)
    if not path.is_file():
        fetch_all(place, [segment])
    return path


def fetch_all(place: Place, segments: Sequence[Segment]) -> None:
    """Brings copies of segments here, those that are not here yet or no longer whole.

    Raises:
        TraceCorruptError: the bucket holds other bytes, none, or a file that cannot be read.
        StoreError: the bucket does not give it.
        OutputError: the cache cannot be written.
    """
    from specctl.collect.foreign import inspect_files

    with output_errors(cache_folder(), "cache folder"):
        missing = [segment for segment in segments if not _is_here(segment)]
        if not missing:
            return
        make_folder(cache_folder() / "segments")
        with ThreadPoolExecutor(PARALLEL_FETCHES) as pool:
            copies = list(pool.map(lambda segment: _copy(place, segment), missing))
        try:
            inspect_files(
                zip(copies, missing, map(place.at, (s.key for s in missing)), strict=True)
            )
            for copy, segment in zip(copies, missing, strict=True):
                publish(copy, cached_path(segment))
        finally:
            for copy in copies:
                copy.unlink(missing_ok=True)
        _trim({cached_path(segment).name for segment in segments})


@contextmanager
def fresh_copy(place: Place, segment: Segment) -> Iterator[Path]:
    """The bytes that a bucket holds now, digest checked and nothing more, while they are looked at.

    Raises:
        As `fetch_all`.
    """
    with output_errors(cache_folder(), "cache folder"):
        make_folder(cache_folder() / "segments")
        path = _copy(place, segment)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _is_here(segment: Segment) -> bool:
    path = cached_path(segment)
    if not path.is_file():
        return False
    try:
        check_file(path, segment)
    except TraceCorruptError:
        path.unlink(missing_ok=True)  # a copy that rotted: the bucket has the original
        return False
    os.utime(path)
    return True


def _copy(place: Place, segment: Segment) -> Path:
    """The bytes of a segment in a temporary file, their digest checked."""
    where = place.at(segment.key)
    try:
        content = read(place.store, segment.key, max_bytes=segment.size_bytes)
    except KeyAbsentError:
        raise damaged(where, f"{segment.size_bytes} bytes", "no object") from None
    except ObjectTooLargeError:
        raise damaged(where, f"{segment.size_bytes} bytes", "more") from None
    path = cache_folder() / "segments" / f"tmp-{uuid.uuid4().hex}"
    write_new(path, content)
    try:
        check_file(path, segment)
    except TraceCorruptError as error:
        path.unlink(missing_ok=True)
        raise damaged(where, segment.sha256[:19] + "…", "other bytes") from error
    return path


def _trim(in_use: set[str]) -> None:
    """Removes the copies that were not used for longest, down to the cap."""
    folder = cache_folder() / "segments"
    found = [(path, path.stat()) for path in folder.glob("*.parquet") if path.name not in in_use]
    excess = sum(status.st_size for _, status in found) - MAX_CACHE_BYTES
    for path, status in sorted(found, key=lambda one: one[1].st_mtime):
        if excess <= 0:
            return
        with suppress(FileNotFoundError):  # another process trimmed as well
            path.unlink()
        excess -= status.st_size
