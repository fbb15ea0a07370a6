"""The logs of all writers of a set, folded into what the set holds."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.collect.commits import Commit, Segment, record_key
from specctl.collect.header import parse_record
from specctl.collect.places import COMMITS, Place, open_place
from specctl.collect.words import count
from specctl.errors import TraceCorruptError, TraceError
from specctl.stores import KeyAbsentError
from specctl.stores.interface import UnreadableError

_RECORD_KEY = re.compile(rf"{COMMITS}/(?P<writer>[0-9a-f]{{32}})/(?P<seq>\d{{8}})\.json")
PARALLEL_READS = 8
"""Records of a bucket read at once; each takes a round trip."""
READ_AHEAD = 64
"""Slots asked of a bucket before the first of them is judged."""


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


@dataclass(frozen=True)
class CommitLog:
    """What the writers of one set acknowledged.

    Attributes:
        commits: those whose rows are the set's, writer by writer.
        records: all that were read, with what was superseded and what only opens an epoch.
        damages: records that were left out.
    """

    place: Place
    commits: tuple[Commit, ...]
    records: tuple[Commit, ...] = ()
    damages: tuple[Damage, ...] = ()

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        return tuple(prompt for commit in self.commits for prompt in commit.prompt_ids)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for commit in self.commits for segment in commit.files)


def read_commits(
    place: Place | Path | str,
    *,
    skip_damaged: bool = False,
    allow_repeats: bool = False,
    chains: Mapping[str, Sequence[Commit]] | None = None,
) -> CommitLog:
    """Folds the logs of all writers, checking chains and that no prompt was committed twice.

    Each writer's log is read from its start without gaps, so a set that is being written to gives
    a state that it had.

    Args:
        skip_damaged: list damaged records instead of refusing them.
        allow_repeats: leave prompts that two commits hold to the caller.
        chains: writers whose logs were read just now, slot by slot: a listing may be behind them.

    Raises:
        TraceCorruptError: a record is damaged, missing or out of its chain, or a prompt is
            acknowledged twice.
        TraceSchemaError: a record of another version.
    """
    place = place if isinstance(place, Place) else open_place(place)
    damages: list[Damage] | None = [] if skip_damaged else None
    chains, listed = chains or {}, list_records(place)
    records = tuple(
        commit
        for writer in sorted(listed.keys() | chains.keys())
        for commit in chains.get(writer) or read_chain(place, writer, listed[writer], damages)
    )
    log = CommitLog(place, tuple(live_commits(records)), records, tuple(damages or ()))
    if not allow_repeats:
        check_unique(log)
    return log


def unreadable_records(log: CommitLog) -> int:
    """Records that are damaged, and gaps; no segment of theirs is known."""
    return sum(damage.commit is None for damage in log.damages)


def told_of_records(num_records: int) -> str:
    """The same for a person."""
    return (
        f"{count(num_records, 'commit record')} or runs of them cannot be read: the prompts and "
        "rows that they acknowledged are not known, and missing besides"
    )


def live_commits(records: Sequence[Commit]) -> Iterator[Commit]:
    """Those that acknowledge rows and that no other record supersedes."""
    superseded = {digest for record in records for digest in record.supersedes or ()}
    for record in records:
        if record.opens is None and record.digest not in superseded:
            yield record


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
        raise _broken(where, content.expected, content.found)
    if content is None:
        raise _broken(where, f"record {seq} of the writer", "none, and later ones")
    record = parse_record(where, content, Commit)
    if (record.writer, record.seq) != (writer, seq) or record.to_bytes() != content:
        found = f"record {record.seq} of {record.writer}, or altered bytes"
        raise _broken(where, f"record {seq} of {writer}", found)
    return record


def _check_link(place: Place, before: Commit | None, record: Commit) -> None:
    """Each record follows the one before it, in the same epoch or by opening the next."""
    wanted = None if before is None else before.digest
    if record.prev_commit != wanted:
        found = f"one after {record.prev_commit or 'none'}"
        raise _broken(place.at(record.key), f"a record after {wanted or 'none'}", found)
    epoch = None if before is None else before.epoch
    if record.opens is not None:
        epoch = (epoch or 0) + 1
    if record.epoch != epoch:
        raise _broken(place.at(record.key), f"epoch {epoch}", f"epoch {record.epoch}")


def _broken(where: str, expected: str, found: str) -> TraceCorruptError:
    fix = "restore the missing or altered commit record"
    return TraceCorruptError(where, expected=expected, found=found, fix=fix)


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


def check_unique(log: CommitLog) -> None:
    """Refuses prompts that two commits of the set hold, naming both.

    Raises:
        TraceCorruptError: its rows would be counted twice.
    """
    for prompt, commits in repeated(log.commits):
        raise TraceCorruptError(
            log.place.name,
            expected="each prompt in one commit",
            found=f"prompt {prompt!r} in two, {commits[0].key} and {commits[1].key}",
            fix="run `specctl traces compact`: it drops equal repeats and names different ones, of "
            "which `specctl traces snapshot TRACES --without COMMIT` leaves one out",
        )


def repeated(commits: Iterable[Commit]) -> list[tuple[str, list[Commit]]]:
    """Prompts of more than one commit, with these commits in their order."""
    owners: dict[str, list[Commit]] = {}
    for commit in commits:
        for prompt in commit.prompt_ids:
            owners.setdefault(prompt, []).append(commit)
    return [(prompt, found) for prompt, found in owners.items() if len(found) > 1]
