"""From a name to a checked log: which commits a reader may use, and what it must leave out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from specctl.collect.cache import fetch_all
from specctl.collect.commits import Commit, check_segment
from specctl.collect.logs import CommitLog, Damage, check_unique, read_commits
from specctl.collect.places import open_place, split_reference
from specctl.collect.quarantine import read_quarantine
from specctl.collect.snapshots import at_snapshot
from specctl.errors import TraceCorruptError

Damaged = Literal["refuse", "skip"]
"""Damage stops the reader, or costs it the commits that are damaged, which it lists."""


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
        TraceCorruptError: something is damaged, or in quarantine, and not to be skipped.
        TraceError: no such snapshot. StoreError: a bucket that cannot be read.
    """
    name, snapshot = split_reference(reference)
    skips = damaged == "skip"
    # Records of a snapshot are known by their digests, so damage to others does not matter.
    is_frozen = snapshot is not None
    log = read_commits(open_place(name), skip_damaged=skips or is_frozen, allow_repeats=True)
    if snapshot is not None:
        log = at_snapshot(log, snapshot)
    log = _without_quarantined(log, skips=skips)
    log = _with_whole_segments(log, verify=verify) if skips else _checked(log, verify=verify)
    if not allow_repeats:
        check_unique(log)
    return log


def _without_quarantined(log: CommitLog, *, skips: bool) -> CommitLog:
    notes = read_quarantine(log.place)
    held = [notes[commit.digest] for commit in log.commits if commit.digest in notes]
    if held and not skips:
        raise TraceCorruptError(
            f"trace set {log.place.name}",
            expected="commits that are whole",
            found=f"{len(held)} of {len(log.commits)} in quarantine, "
            f"{sum(note.num_rows for note in held)} rows",
            fix="restore their files and run `specctl traces verify --quarantine`, or use what "
            "`specctl traces snapshot TRACES --without-damaged` names",
        )
    return _without(log, [note.damage for note in held])


def _checked(log: CommitLog, *, verify: bool) -> CommitLog:
    if log.place.root is None and verify:
        fetch_all(log.place, log.segments)
        return log
    for segment in log.segments:
        check_segment(log.place, segment, verify=verify)
    return log


def _with_whole_segments(log: CommitLog, *, verify: bool) -> CommitLog:
    """Leaves out commits with a damaged file: the rows of a prompt stand in all of them."""
    found = [_damage(log, commit, verify=verify) for commit in log.commits]
    return _without(log, [damage for damage in found if damage is not None])


def _damage(log: CommitLog, commit: Commit, *, verify: bool) -> Damage | None:
    for segment in commit.files:
        try:
            check_segment(log.place, segment, verify=verify)
        except TraceCorruptError as error:
            return Damage(segment.key, str(error), commit.digest, commit.num_rows)
    return None


def _without(log: CommitLog, damages: list[Damage]) -> CommitLog:
    lost = {damage.commit for damage in damages}
    kept = tuple(commit for commit in log.commits if commit.digest not in lost)
    return replace(log, commits=kept, damages=(*log.damages, *damages))
