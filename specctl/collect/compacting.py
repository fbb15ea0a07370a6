"""Few large segments in the place of many small ones, and files that nobody needs any more.

A compaction is a commit that supersedes others and holds their rows, in their order. Nothing is
edited: readers that opened the set before, and snapshots, still find the old commits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specctl.collect.commits import COMPACTOR, Commit
from specctl.collect.header import read_header
from specctl.collect.logs import CommitLog, read_commits, repeated
from specctl.collect.opening import open_log
from specctl.collect.places import COMMITS, DATA, Place, open_place, probe_bucket
from specctl.collect.quarantine import read_quarantine
from specctl.collect.snapshots import at_snapshot, list_snapshots
from specctl.collect.store import TraceWriter
from specctl.collect.tables import Comparison, join_tables, read_tables
from specctl.collect.words import count, count_are
from specctl.stores.probing import now_s
from specctl.trace import TABLES

_SEGMENT = re.compile(rf"{DATA}/({'|'.join(TABLES)})-[0-9a-f]{{64}}\.parquet")
"""What a writer of ours may have left; no other file is a pruner's to remove."""
TARGET_ROWS = 2_000_000
"""Rows of both tables in a compacted commit, about; they are in memory together."""
GRACE_S = 24 * 3600.0
"""Longer than any fit reads, and than a writer may have between a segment and its record
(`MAX_COMMIT_S`). A segment's name has one writer, so its age is that writer's (`segments`)."""


@dataclass(frozen=True)
class Compaction:
    """What a compaction did.

    Attributes:
        num_repeats: prompts that stood in several commits with equal rows.
        num_pruned: segments that were removed. pruned_bytes: their size.
    """

    num_commits_before: int
    num_commits: int
    num_repeats: int
    num_pruned: int = 0
    pruned_bytes: int = 0

    def pruned(self, num_pruned: int, pruned_bytes: int) -> Compaction:
        """With what was removed afterwards."""
        return replace(self, num_pruned=num_pruned, pruned_bytes=pruned_bytes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        """For a person."""
        removed = f"; removed {count(self.num_pruned, 'file')} of {self.pruned_bytes / 1e6:.1f} MB"
        return self._joined() + (removed if self.num_pruned else "")

    def _joined(self) -> str:
        if not self.num_repeats and self.num_commits == self.num_commits_before:
            return f"nothing to join: {count(self.num_commits, 'commit')}"
        before = count_are(self.num_commits_before, "commit")
        dropped = f", dropped {count(self.num_repeats, 'equal repeat')}" if self.num_repeats else ""
        return f"{before} {self.num_commits} now{dropped}"


def compact(
    name: str | Path,
    *,
    target_rows: int = TARGET_ROWS,
    on_commit: Callable[[int], None] | None = None,
) -> Compaction:
    """Joins commits that are smaller than the target, and drops equal repeats of prompts.

    Commits in quarantine stay as they are.

    Args:
        on_commit: called with the number of commits joined, each time.

    Raises:
        TraceCorruptError: damage, or two commits with different rows of one prompt.
        TraceError, OutputError, StoreError: see `TraceWriter.open` and `open_log`.
    """
    place = open_place(name)
    read_header(place)
    probe_bucket(place)
    read_commits(place, allow_repeats=True)  # before anything is written to a damaged set
    with TraceWriter.named(place, COMPACTOR, allow_repeats=True) as writer:
        log = open_log(name, damaged="noted", allow_repeats=True)
        repeats = _check_repeats(log)
        for group in _groups(log.commits, target_rows, set(repeats)):
            writer.replace(group, *_joined(place, group, repeats))
            if on_commit is not None:
                on_commit(len(group))
    num_before = len(log.commits) + len(log.damages)
    num_after = len(read_commits(place, allow_repeats=True).commits)  # of those in quarantine too
    return Compaction(num_before, num_after, len(repeats))


def _check_repeats(log: CommitLog) -> dict[str, Commit]:
    """The commit that keeps each prompt of several; the first of them.

    Raises:
        TraceCorruptError: their rows differ.
    """
    owners: dict[str, Commit] = {}
    pairs: dict[tuple[str, str], tuple[Commit, Commit, list[str]]] = {}
    for prompt, (first, *others) in repeated(log.commits):
        owners[prompt] = first
        for other in others:
            found = pairs.setdefault((first.digest, other.digest), (first, other, []))
            found[2].append(prompt)
    comparison = Comparison()
    # A large commit meets many small ones: it is read once when they come one after another.
    for first, other, prompts in sorted(pairs.values(), key=_larger):
        comparison.check(prompts, (log.place, first), (log.place, other))
    return owners


def _larger(pair: tuple[Commit, Commit, list[str]]) -> tuple[int, str]:
    return max((commit.num_rows, commit.digest) for commit in pair[:2])


def _groups(
    commits: Sequence[Commit], target_rows: int, repeats: set[str]
) -> Iterator[list[Commit]]:
    """Commits to join, in order; a group of one only where rows of it go."""
    group: list[Commit] = []
    num_rows = 0
    for commit in commits:
        has_repeats = not repeats.isdisjoint(commit.prompt_ids)
        if commit.num_rows >= target_rows and not has_repeats:
            continue
        group.append(commit)
        num_rows += commit.num_rows
        if num_rows >= target_rows:
            yield group
            group, num_rows = [], 0
    if len(group) > 1 or any(not repeats.isdisjoint(one.prompt_ids) for one in group):
        yield group


def _joined(
    place: Place, group: Sequence[Commit], owners: dict[str, Commit]
) -> tuple[list[str], dict[str, object]]:
    prompts, parts = [], []
    for commit in group:
        dropped = {p for p in commit.prompt_ids if owners.get(p, commit).digest != commit.digest}
        prompts += [prompt for prompt in commit.prompt_ids if prompt not in dropped]
        parts.append(read_tables(place, commit, without=dropped))
    return sorted(prompts), join_tables(parts)


def prune(name: str | Path, *, grace_s: float = GRACE_S) -> tuple[int, int]:
    """Removes segments that no commit in use, no snapshot and no living writer needs.

    Ages are by the store's clock alone, whatever the clocks of this machine and of writers say.

    Args:
        grace_s: age of the superseding commit, or of a segment without any commit, seconds.

    Returns:
        Their number, and their bytes.

    Raises:
        TraceError: a damaged set, or a snapshot one of whose records is gone; nothing is removed.
        StoreError: the store cannot be written.
    """
    place = open_place(name)
    log = read_commits(place, allow_repeats=True)
    before_s = now_s(place.store) - grace_s
    needed = {segment.key for commit in _needed(log, before_s) for segment in commit.files}
    removed = [
        found
        for found in place.store.objects(DATA)
        if _SEGMENT.fullmatch(found.key)
        and found.key not in needed
        and found.modified_s <= before_s
    ]
    for found in removed:
        place.store.delete(found.key)
    return len(removed), sum(found.size_bytes for found in removed)


def _needed(log: CommitLog, before_s: float) -> Iterator[Commit]:
    """Commits that are read now, by a snapshot, or were until a moment ago, and those whose rows a
    damaged compaction may have lost."""
    yield from log.commits
    yield from _superseded_by(log, read_quarantine(log.place))
    for digest in list_snapshots(log.place):
        yield from at_snapshot(log, digest).commits
    fresh = {found.key for found in log.place.store.objects(COMMITS) if found.modified_s > before_s}
    recent = {
        digest
        for record in log.records
        if record.key in fresh
        for digest in record.supersedes or ()
    }
    yield from (record for record in log.records if record.digest in recent)


def _superseded_by(log: CommitLog, digests: Iterable[str]) -> Iterator[Commit]:
    """What some compactions superseded, and what that had superseded."""
    known = {record.digest: record for record in log.records}
    left = list(digests)
    while left:
        record = known.get(left.pop())
        for digest in (record and record.supersedes) or ():
            left.append(digest)
            yield from (known[digest],) if digest in known else ()
