"""Local copies of segments that live in a bucket, named by their digest.

A copy has its name only after its digest was checked and a child process read all of it, so what
stands here can be opened like a segment of one's own. Only its owner can: who may not read the
bucket must not read it here.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from specctl.collect.commits import Segment, check_file, damaged
from specctl.collect.foreign import File, refusals, unreadable
from specctl.collect.places import Place
from specctl.durable import make_folder, output_errors, publish, write_new
from specctl.errors import TraceCorruptError
from specctl.stores import KeyAbsentError
from specctl.stores.creating import read
from specctl.stores.interface import ObjectTooLargeError

MAX_CACHE_BYTES = 32 << 30
"""What copies may occupy besides those in use; the oldest go first."""
IN_USE_S = 24 * 3600.0
"""What was opened so long ago is read no more, whichever process opened it."""
PARALLEL_FETCHES = 4
SMALL_BYTES = 64 << 20
"""What is fetched side by side; a larger file passes through memory alone."""
BATCH_ITEMS, BATCH_BYTES = 2048, 2 << 30
TEMPORARY = "tmp-"
T = TypeVar("T")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/specctl`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "specctl"


def cached_path(segment: Segment) -> Path:
    """Where the copy of a segment is, or would be."""
    hexdigest = segment.sha256.removeprefix("sha256:")
    return cache_folder() / "segments" / f"{segment.table}-{hexdigest}.parquet"


def fetched(place: Place, segment: Segment) -> Path:
    """The copy of one segment, brought here if it is not; see `fetch_all`.

    Raises:
        TraceCorruptError: the bucket holds other bytes, none, or a file that cannot be read.
    """
    path = cached_path(segment)
    if not path.is_file():
        for error in fetch_all(place, [segment]).values():
            raise error
    return path


def fetch_all(place: Place, segments: Sequence[Segment]) -> dict[str, TraceCorruptError]:
    """Brings copies of segments here, those that are not here yet or no longer whole.

    Returns:
        by key what could not be brought: the bucket holds other bytes, none, or an unsound file.

    Raises:
        StoreError: the bucket does not give it.
        OutputError: the cache cannot be written, or this machine cannot inspect a file.
    """
    failures: dict[str, TraceCorruptError] = {}
    with output_errors(cache_folder(), "cache folder"):
        missing = [segment for segment in segments if not _is_here(segment)]
        if not missing:
            return failures
        _make_private_folder()
        _clear_abandoned(cache_folder() / "segments")
        for batch in batches(missing, lambda segment: segment.size_bytes):
            failures |= _fetch(place, batch)
        _trim()
    return failures


def batches(items: Iterable[T], size_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """What is on disk together, and read by one child: some thousand files, or some GiB."""
    batch: list[T] = []
    room = BATCH_BYTES
    for item in items:
        if batch and (len(batch) == BATCH_ITEMS or size_bytes(item) > room):
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(item)
        room -= size_bytes(item)
    if batch:
        yield batch


def _fetch(place: Place, segments: Sequence[Segment]) -> dict[str, TraceCorruptError]:
    with ExitStack() as copies, ThreadPoolExecutor(PARALLEL_FETCHES) as pool:
        paths = [copies.enter_context(_temporary()) for _ in segments]
        pairs = list(zip(segments, paths, strict=True))
        small = [pair for pair in pairs if pair[0].size_bytes <= SMALL_BYTES]
        large = [pair for pair in pairs if pair[0].size_bytes > SMALL_BYTES]
        told = [*pool.map(lambda pair: _copied(place, *pair), small)]
        told += [_copied(place, *pair) for pair in large]
        failures = {error[0]: error[1] for error in told if error is not None}
        whole = [
            File(path, segment, place.at(segment.key))  # a copy may serve many commits
            for segment, path in pairs
            if segment.key not in failures
        ]
        for segment, name, reason in refusals(whole):
            failures[segment.key] = unreadable(name, reason)
        for path, segment, *_ in whole:
            if segment.key not in failures:
                publish(path, cached_path(segment))
    return failures


def _copied(place: Place, segment: Segment, path: Path) -> tuple[str, TraceCorruptError] | None:
    try:
        _copy(place, segment, path)
    except TraceCorruptError as error:
        return segment.key, error
    return None


@contextmanager
def fresh_copy(place: Place, segment: Segment) -> Iterator[Path]:
    """The bytes that a bucket holds now, digest checked and nothing more, while they are looked at.

    Raises:
        TraceCorruptError: it holds other bytes, or none.
        StoreError, OutputError: as `fetch_all`.
    """
    with _temporary() as path:
        with output_errors(cache_folder(), "cache folder"):
            _make_private_folder()
            _copy(place, segment, path)
        yield path


@contextmanager
def _temporary() -> Iterator[Path]:
    path = cache_folder() / "segments" / f"{TEMPORARY}{uuid.uuid4().hex}"
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


def _copy(place: Place, segment: Segment, path: Path) -> None:
    """The bytes of a segment in a file that does not exist yet, their digest checked."""
    where = place.at(segment.key)
    try:
        content = read(place.store, segment.key, max_bytes=segment.size_bytes)
    except KeyAbsentError:
        raise damaged(where, f"{segment.size_bytes} bytes", "no object") from None
    except ObjectTooLargeError:
        raise damaged(where, f"{segment.size_bytes} bytes", "more") from None
    write_new(path, content, mode=0o600)
    try:
        check_file(path, segment)
    except TraceCorruptError as error:
        raise damaged(where, segment.sha256[:19] + "…", "other bytes") from error


def _make_private_folder() -> None:
    """For its owner alone, one of an earlier version too: the bucket may be as private."""
    folder = cache_folder() / "segments"
    make_folder(folder)
    folder.chmod(0o700)


def _clear_abandoned(folder: Path) -> None:
    """Removes unfinished copies of processes that were killed."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):  # another process has just removed it
            if time.time() - path.stat().st_mtime > IN_USE_S:
                path.unlink()


def _trim() -> None:
    """Removes the copies that were not used for longest, down to the cap."""
    folder = cache_folder() / "segments"
    found = [(path, path.stat()) for path in folder.glob("*.parquet")]
    unused = [one for one in found if time.time() - one[1].st_mtime > IN_USE_S]
    excess = sum(status.st_size for _, status in unused) - MAX_CACHE_BYTES
    for path, status in sorted(unused, key=lambda one: one[1].st_mtime):
        if excess <= 0:
            return
        with suppress(FileNotFoundError):  # another process trimmed as well
            path.unlink()
        excess -= status.st_size
