"""A place for a set: refused where it is not ours to write to, else brought into shape."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from specctl.collect.commits import writer_id
from specctl.collect.header import TraceHeader, read_header
from specctl.collect.places import (
    COMMITS,
    FOLDERS,
    HEADER_NAME,
    Place,
    enclosing_set,
    probe_bucket,
)
from specctl.collect.same_run import check_same_run
from specctl.collect.shards import Shard
from specctl.durable import RESUME, make_folder, output_errors
from specctl.errors import OutputError, TraceCorruptError
from specctl.stores import KeyTakenError, create
from specctl.stores.local import LocalStore

ABANDONED_S = 24 * 3600.0
"""Age at which an unfinished file of a folder is nobody's any more."""


def check_place(place: Place, shard: Shard, *, resume: bool) -> None:
    """Refuses a place that is not ours to write to; nothing is created there.

    A further shard joins a set without `resume`, which is there for what was begun already.

    Raises:
        OutputError: it holds something else, or traces and `resume` is off.
        TraceCorruptError: it holds commits and no header.
        StoreError: a bucket that cannot be reached.
    """
    if place.root is not None:
        _check_folder(place.root)
    _check_header_is_there(place)
    joins = shard.count > 1 and not place.keys(f"{COMMITS}/{writer_id(shard.name)}")
    if not resume and not joins and place.holds(HEADER_NAME):
        fix = "go on with --resume, or choose another folder"
        raise _refused(place.name, "an empty folder", "traces", fix)


def _check_header_is_there(place: Place) -> None:
    """A new header would say of the rows that are there what was never true of them."""
    if place.holds(HEADER_NAME) or not place.keys(COMMITS):
        return
    if not place.holds(HEADER_NAME):  # no other writer has begun meanwhile
        raise TraceCorruptError(
            place.at(HEADER_NAME),
            expected="the header of the commits that are there",
            found="none",
            fix="restore the file, or choose another place",
        )


def _check_folder(root: Path) -> None:
    with output_errors(root, "trace folder"):
        _check_outside_sets(root)
        exists, is_folder = root.exists(), root.is_dir()
        names = {entry.name for entry in root.iterdir()} if is_folder else set()
    if exists and not is_folder:
        raise _refused(str(root), "a folder", "a file", "choose another place")
    # A writer killed before its header was published leaves an empty set: `tmp/` alone.
    if HEADER_NAME not in names and names - FOLDERS:
        found = f"{min(names - FOLDERS)!r} and no {HEADER_NAME}"
        fix = "choose another folder"
        raise _refused(str(root), "an empty folder or a trace set", found, fix)


def _check_outside_sets(root: Path) -> None:
    """A set in another one would stand among what that one's readers and pruners look through."""
    found = enclosing_set(root)
    if found is not None:
        expected, fix = "a folder outside of other sets", "choose another place"
        raise _refused(str(root), expected, f"one in {found}", fix)


def _refused(name: str, expected: str, found: str, fix: str) -> OutputError:
    return OutputError(f"trace folder {name}", expected=expected, found=found, fix=fix)


def prepare(place: Place, header: TraceHeader) -> None:
    """Brings a place into shape: a header of this run, and nothing that was abandoned."""
    if isinstance(place.store, LocalStore):
        with output_errors(place.store.root, "trace folder", RESUME):
            make_folder(place.store.root)
            place.store.clear_temporary(ABANDONED_S)
    probe_bucket(place)
    if not place.holds(HEADER_NAME):
        with suppress(KeyTakenError):  # another writer was first; theirs must do
            create(place.store, HEADER_NAME, header.to_bytes())
    check_same_run(place, read_header(place), header)
