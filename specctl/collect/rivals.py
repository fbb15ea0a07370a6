"""Writers of one set whose prompts overlap: those of another `--shard` count.

Shards of one count share no prompt, so they never need to know of each other. One of another count
may hold any of our prompts. Who starts under a new count therefore opens its own epoch, then an
epoch that nobody holds in every log of another count, and only then reads what is committed. Of
two writers of different counts at least one sees the other's log, and a commit of the other either
stands before that epoch, and is read, or never happens. Nothing needs a clock, and writers that
ended long ago cost one record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from specctl.collect.chains import RESTORE, list_records, read_slot
from specctl.collect.commits import Commit, record_key, writer_id
from specctl.collect.places import COMMITS, Place
from specctl.collect.records import parse_record
from specctl.collect.shards import Shard
from specctl.collect.writer_log import WriterLog
from specctl.durable import RESUME, lock_folder, make_folder, output_errors
from specctl.errors import OutputError

_NAME = re.compile(r"shard \d{1,4}/(?P<count>\d{1,4})")


def check_count(place: Place, shard: Shard) -> None:
    """Refuses to join writers of another count without being told to.

    Raises:
        OutputError: there are some, which may still be at work.
    """
    for name in _rivals(place, shard):
        raise OutputError(
            f"trace set {place.name}",
            expected=f"writers of --shard I/{shard.count}",
            found=f"writer {name!r}",
            fix="use its count; or end all writers and go on with --resume, which shuts them out",
        )


def retire_rivals(place: Place, shard: Shard, header_digest: str) -> dict[str, tuple[Commit, ...]]:
    """Shuts out all writers of another count; returns their logs, which are final now.

    Args:
        header_digest: of the set's header.

    Raises:
        OutputError: one of them is at work on this machine, or is being taken over.
        TraceError: a damaged log. StoreError: the store refuses.
    """
    retired = {}
    for name in _rivals(place, shard):
        with held(place, name):
            retired[writer_id(name)] = WriterLog.retire(place, name, header_digest)
    return retired


def _rivals(place: Place, shard: Shard) -> Iterator[str]:
    for writer in sorted(list_records(place)):
        key = record_key(writer, 0)
        content = read_slot(place, key)
        opens = content and parse_record(place.at(key), content, Commit, fix=RESTORE).opens
        found = _NAME.fullmatch(opens or "")
        if found is not None and int(found["count"]) != shard.count:
            yield found[0]


@contextmanager
def held(place: Place, name: str) -> Iterator[None]:
    """While a writer's name is taken on this machine; see `lock`."""
    descriptor = lock(place, name)
    try:
        yield
    finally:
        unlock(descriptor)


def lock(place: Place, name: str) -> int:
    """A courtesy on one machine: a second start by mistake is refused, where the protocol alone
    would let it take over. Returns a descriptor, or -1 for a bucket.

    Raises:
        OutputError: a process of this machine has the writer.
    """
    if place.root is None:
        return -1
    folder = place.root / COMMITS / writer_id(name)
    with output_errors(folder, "trace folder", RESUME):
        make_folder(folder.absolute())
        return lock_folder(folder)


def unlock(descriptor: int) -> None:
    """Gives the name back."""
    if descriptor >= 0:
        with suppress(OSError):  # nothing was written through it, and it is released all the same
            os.close(descriptor)
