"""The records of one writer, slot by slot, each checked against the one before it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from specctl.collect.commits import Commit, record_key
from specctl.collect.places import COMMITS, HEADER_NAME, Place
from specctl.collect.records import parse_record
from specctl.errors import TraceCorruptError, TraceError
from specctl.stores import KeyAbsentError
from specctl.stores.interface import UnreadableError

_RECORD_KEY = re.compile(rf"{COMMITS}/(?P<writer>[0-9a-f]{{32}})/(?P<seq>\d{{8}})\.json")
PARALLEL_READS = 8
"""Records of a bucket read at once; each takes a round trip."""
READ_AHEAD = 64
"""Slots asked of a bucket before the first of them is judged."""
RESTORE = (
    "restore the missing or altered commit record, or go on in a new set with what is whole "
    "(`specctl traces snapshot TRACES --without-damaged`, then `traces merge` what that names)"
)


@dataclass(frozen=True)
class Damage:
    """Something of a set that cannot be used.

    Attributes:
        what: key of a record or segment. reason: one line. commit: the digest, where known.
        num_rows: rows of both tables that are missing with it; None where that is not known.
    """

    what: str
    reason: str
    commit: str | None = None
    num_rows: int | None = None


def read_chain(
    place: Place, writer: str, listed: Sequence[int], damages: list[Damage] | None = None
) -> Iterator[Commit]:
    """The records of one writer up to the last that was listed, checked one against another.

    Nothing is read behind the first damage that is refused, whatever number a record claims.

    Args:
        listed: numbers of its records, rising; those between them are read too.
        damages: takes what is damaged, a gap as one; None refuses it.
    """
    before: Commit | None = None
    is_known = True  # whether `before` is what the next record must point to
    for seq, content in _slots(place, writer, listed):
        try:
            record = _parse(place, writer, seq, content)
            if is_known:
                _check_link(place, before, record)
        except TraceError as error:
            if damages is None:
                raise
            damages.append(Damage(record_key(writer, seq), str(error)))
            is_known = False
            continue
        before, is_known = record, True
        yield record


Content = bytes | UnreadableError | None
"""Of a slot: its bytes, why they cannot be read, or None where it is free."""


def _slots(place: Place, writer: str, listed: Sequence[int]) -> Iterator[tuple[int, Content]]:
    """Slots in order with their bytes; of free ones next to each other the first, with None."""
    seq, end = 0, listed[-1] + 1 if listed else 0
    while seq < end:
        ahead = range(seq, min(seq + READ_AHEAD, end))
        for slot, content in zip(ahead, _contents(place, writer, ahead), strict=True):
            yield slot, content
            seq = slot + 1
            if content is None:
                behind = bisect_right(listed, slot)
                seq = listed[behind] if behind < len(listed) else end
                break


def _contents(place: Place, writer: str, slots: range) -> Iterator[Content]:
    """What each slot holds, in order."""
    keys = [record_key(writer, seq) for seq in slots]
    if place.root is not None:
        yield from (_content(place, key) for key in keys)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        yield from pool.map(lambda key: _content(place, key), keys)


def _content(place: Place, key: str) -> Content:
    try:
        return read_slot(place, key)
    except UnreadableError as error:
        return error


def read_slot(place: Place, key: str) -> bytes | None:
    """A record's bytes, None where the slot is free."""
    try:
        return place.read(key)
    except KeyAbsentError:
        return None


def _parse(place: Place, writer: str, seq: int, content: Content) -> Commit:
    where = place.at(record_key(writer, seq))
    if isinstance(content, UnreadableError):
        raise broken(where, content.expected, content.found)
    if content is None:
        raise broken(where, f"record {seq} of the writer", "none, and later ones")
    record = parse_record(where, content, Commit, fix=RESTORE)
    if (record.writer, record.seq) != (writer, seq):
        raise broken(where, f"record {seq} of {writer}", f"record {record.seq} of {record.writer}")
    return record


def _check_link(place: Place, before: Commit | None, record: Commit) -> None:
    """Each record follows the one before it, in the same epoch or by opening the next."""
    where, wanted = place.at(record.key), None if before is None else before.digest
    if record.prev_commit != wanted:
        found = f"one after {record.prev_commit or 'none'}"
        raise broken(where, f"a record after {wanted or 'none'}", found)
    epoch = None if before is None else before.epoch
    if record.opens is not None:
        epoch = (epoch or 0) + 1
    if record.epoch != epoch:
        raise broken(where, f"epoch {epoch}", f"epoch {record.epoch}")
    for name in ("body_digest", "header_digest"):  # who began to write them goes on to
        if getattr(before, name, None) is not None and getattr(record, name) is None:
            raise broken(where, f"a {name}, as the record before it has", "none")


def check_header(place: Place, records: Iterable[Commit], header_digest: str) -> None:
    """Refuses a header that is not the one which the records were written under.

    Args:
        header_digest: of the header that is there. Records of the first writers name none.

    Raises:
        TraceCorruptError: one of the two was altered, or is of another set.
    """
    for record in records:
        if record.header_digest not in (None, header_digest):
            raise TraceCorruptError(
                place.at(HEADER_NAME),
                expected=f"{record.header_digest[:19]}…, as {record.key} says",
                found=f"{header_digest[:19]}…",
                fix="restore the file; what was fitted or is read under another one is not of "
                "these rows",
            )


def broken(where: str, expected: str, found: str) -> TraceCorruptError:
    """The error of a record that cannot be used."""
    return TraceCorruptError(where, expected=expected, found=found, fix=RESTORE)


def list_records(place: Place, writer: str | None = None) -> dict[str, list[int]]:
    """Numbers of records by writer, of all or of one: a listing beside a writer may miss some.

    Raises:
        TraceCorruptError: something else lies between them.
    """
    listed: dict[str, list[int]] = {}
    for key in place.keys(COMMITS if writer is None else f"{COMMITS}/{writer}"):
        found = _RECORD_KEY.fullmatch(key)
        if found is None:
            raise TraceCorruptError(
                place.at(key),
                expected=f"{COMMITS}/<writer>/<seq>.json",
                found="another name",
                fix="remove it; nothing of ours creates such files",
            )
        listed.setdefault(found["writer"], []).append(int(found["seq"]))
    return listed
