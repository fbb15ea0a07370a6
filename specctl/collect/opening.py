"""From a name to a checked log: which commits a reader may use, and what it must leave out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from specctl.collect.cache import fetch_all
from specctl.collect.chains import Damage, check_header
from specctl.collect.commits import Commit, Segment
from specctl.collect.files import check_segment
from specctl.collect.header import read_header
from specctl.collect.logs import CommitLog, check_unique, read_commits
from specctl.collect.places import Place, open_place, split_reference
from specctl.collect.quarantine import quarantined, read_quarantine
from specctl.collect.records import check_schema_id
from specctl.collect.snapshots import at_snapshot
from specctl.errors import TraceCorruptError

Damaged = Literal["refuse", "skip", "noted"]
"""Damage stops the reader, or costs it the commits that are damaged, which it lists; `noted` takes
that of commits in quarantine alone, and puts nothing in their place."""


def open_log(
    reference: str | Path,
    *,
    verify: bool = True,
    damaged: Damaged = "refuse",
    allow_repeats: bool = False,
) -> CommitLog:
    """The commits of `TRACES` as they are now, or of `TRACES@sha256:<hex>` as they were frozen.

    Args:
        verify: digest every file; without it only names and sizes are checked.
        allow_repeats: leave prompts that two commits hold to the caller.

    Raises:
        TraceCorruptError: something is damaged, or in quarantine, and not to be skipped; or the
            header is not that of the commits.
        TraceError: no such snapshot. StoreError: a bucket that cannot be read.
    """
    name, snapshot = split_reference(reference)
    skips = damaged == "skip"
    # Records of a snapshot are known by their digests, so damage to others does not matter.
    is_frozen = snapshot is not None
    log = read_commits(open_place(name), skip_damaged=skips or is_frozen, allow_repeats=True)
    if snapshot is not None:
        log = at_snapshot(log, snapshot)
    check_header(log.place, log.commits, read_header(log.place).digest)
    log = _usable(log, verify=verify, damaged=damaged)
    if not allow_repeats:
        check_unique(log)
    return log


def _usable(log: CommitLog, *, verify: bool, damaged: Damaged) -> CommitLog:
    """Without what is damaged. Where that is a compaction, and damage is skipped, what it
    superseded takes its place again, as far as it is there."""
    skips = damaged == "skip"
    log = _without_quarantined(log, skips=damaged != "refuse")
    log = _with_whole_segments(log, _failures(log, verify=verify), skips=skips)
    earlier = _superseded_by_damaged(log) if skips else ()
    if not earlier:
        return log
    found = _usable(replace(log, commits=earlier, damages=()), verify=verify, damaged=damaged)
    found = _less_repeated(found, set(log.prompt_ids))
    damages = (*_less_replaced(log), *found.damages)
    return replace(log, commits=(*log.commits, *found.commits), damages=damages)


def _superseded_by_damaged(log: CommitLog) -> tuple[Commit, ...]:
    lost = {damage.commit for damage in log.damages}
    digests = {
        digest
        for record in log.records
        if record.digest in lost
        for digest in record.supersedes or ()
    }
    digests -= {commit.digest for commit in log.commits}
    return tuple(record for record in log.records if record.digest in digests)


def _less_repeated(log: CommitLog, held: set[str]) -> CommitLog:
    """Without commits that hold a prompt again: a compaction had dropped its equal repeats."""
    damages = []
    for commit in log.commits:
        if again := held.intersection(commit.prompt_ids):
            reason = f"prompt {min(again)!r} again, which its compaction had dropped"
            damages.append(Damage(commit.key, reason, commit.digest, commit.num_rows))
        else:
            held.update(commit.prompt_ids)
    return _without(log, damages)


def _less_replaced(log: CommitLog) -> Iterator[Damage]:
    """The damages, those of compactions that were replaced in full without their rows."""
    known = {record.digest: record for record in log.records}
    for damage in log.damages:
        superseded = damage.commit and known[damage.commit].supersedes
        is_replaced = superseded and known.keys() >= set(superseded)
        yield replace(damage, num_rows=0) if is_replaced else damage


def _without_quarantined(log: CommitLog, *, skips: bool) -> CommitLog:
    notes = read_quarantine(log.place)
    held = [quarantined(commit, notes) for commit in log.commits if commit.digest in notes]
    if held and not skips:
        raise TraceCorruptError(
            f"trace set {log.place.name}",
            expected="commits that are whole",
            found=f"{len(held)} of {len(log.commits)} in quarantine, "
            f"{sum(damage.num_rows or 0 for damage in held)} rows",
            fix="restore their files and run `specctl traces verify --quarantine`, or use what "
            "`specctl traces snapshot TRACES --without-damaged` names",
        )
    return _without(log, held)


def _failures(log: CommitLog, *, verify: bool) -> dict[str, TraceCorruptError]:
    """By key, the segments that are not what was committed; copies of a bucket's are checked too.

    Raises:
        TraceSchemaError: columns that this version does not know.
    """
    if log.place.root is None and verify:
        for segment in log.segments:
            check_schema_id(log.place.at(segment.key), segment.table, segment.schema_id)
        return fetch_all(log.place, log.segments)
    found = ((segment.key, _failure(log.place, segment, verify=verify)) for segment in log.segments)
    return {key: error for key, error in found if error is not None}


def _failure(place: Place, segment: Segment, *, verify: bool) -> TraceCorruptError | None:
    try:
        check_segment(place, segment, verify=verify)
    except TraceCorruptError as error:
        return error
    return None


def _with_whole_segments(
    log: CommitLog, failures: dict[str, TraceCorruptError], *, skips: bool
) -> CommitLog:
    """Leaves out commits with a damaged file: the rows of a prompt stand in all of them."""
    damages = []
    for commit in log.commits:
        key = next((segment.key for segment in commit.files if segment.key in failures), None)
        if key is None:
            continue
        if not skips:
            raise failures[key]
        damages.append(Damage(key, str(failures[key]), commit.digest, commit.num_rows))
    return _without(log, damages)


def _without(log: CommitLog, damages: list[Damage]) -> CommitLog:
    lost = {damage.commit for damage in damages}
    kept = tuple(commit for commit in log.commits if commit.digest not in lost)
    return replace(log, commits=kept, damages=(*log.damages, *damages))
