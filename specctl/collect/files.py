"""The local file of a segment, whole: a folder's own, or a copy of what a bucket holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specctl.collect.cache import fetched
from specctl.collect.commits import Segment, check_file, damaged
from specctl.collect.places import Place
from specctl.collect.records import check_schema_id
from specctl.durable import READ_AGAIN
from specctl.stores.interface import UnreadableError


def segment_path(place: Place, segment: Segment) -> Path:
    """A local file of a segment: the folder's own, or a copy fetched from the bucket.

    Raises:
        TraceCorruptError: what the bucket holds is not the segment.
        StoreError: the bucket does not give it.
    """
    return fetched(place, segment) if place.root is None else segment.path(place.root)


def check_segment(place: Place, segment: Segment, *, verify: bool) -> None:
    """Refuses a file that is not what its record says; one of a bucket is fetched for that.

    Args:
        verify: read and digest the bytes too, not only their number.

    Raises:
        TraceCorruptError: missing, truncated, altered, or beyond what the disk can read.
        TraceSchemaError: other columns.
        StoreError: the bucket cannot be reached, or the file is not ours to read.
    """
    check_schema_id(place.at(segment.key), segment.table, segment.schema_id)
    if place.root is None:
        if verify:
            fetched(place, segment)
        return
    with _readable(segment.path(place.root), segment):
        _check_own_file(segment.path(place.root), segment, verify=verify)


def _check_own_file(path: Path, segment: Segment, *, verify: bool) -> None:
    if path.is_symlink() or path.parent.is_symlink():  # what it leads to is not the set's
        raise damaged(str(path), "a file of the set's own", "a link")
    check_file(path, segment, verify=verify)


@contextmanager
def _readable(path: Path, segment: Segment) -> Iterator[None]:
    """What the system refuses to read: who lacks the right for it must not call it damage."""
    try:
        yield
    except PermissionError as error:
        raise UnreadableError(
            str(path), expected="a file that can be read", found=str(error.strerror), fix=READ_AGAIN
        ) from error
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise damaged(str(path), f"{segment.size_bytes} bytes", found) from error
