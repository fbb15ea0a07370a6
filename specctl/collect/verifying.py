"""Everything that can be checked of a set, without stopping at the first damage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specctl.collect.cache import batches, fresh_copy
from specctl.collect.chains import Damage, check_header
from specctl.collect.commits import Commit, Segment
from specctl.collect.doubles import RoundKeys
from specctl.collect.files import check_segment
from specctl.collect.foreign import files_of, refusals
from specctl.collect.header import read_header
from specctl.collect.logs import (
    CommitLog,
    read_commits,
    repeated,
    told_of_records,
    unreadable_records,
)
from specctl.collect.places import (
    HEADER_NAME,
    Place,
    open_place,
    probe_bucket,
    split_reference,
)
from specctl.collect.quarantine import note_damages, put_in_quarantine, read_quarantine, release
from specctl.collect.snapshots import at_snapshot, list_snapshots
from specctl.collect.words import count, count_are
from specctl.errors import TraceError


@dataclass(frozen=True)
class Verification:
    """The state of a set.

    Attributes:
        name: as it was asked for, with the snapshot where one was.
        damages: what cannot be used, and why.
        num_unreadable_records: commit records that are damaged, and gaps where some are missing;
            what they acknowledged nobody knows.
        num_missing_rows: of both tables, in damaged commits.
        num_quarantined: commits that plain readers are told about.
        num_orphans: segments that no record names: a writer died or is about to commit, or the
            last records of its log were lost.
    """

    name: str
    num_commits: int
    num_prompts: int
    num_rows: int
    size_bytes: int
    num_snapshots: int
    num_orphans: int
    num_quarantined: int
    num_missing_rows: int
    num_unreadable_records: int
    damages: tuple[Damage, ...]

    @property
    def is_whole(self) -> bool:
        return not self.damages

    def to_json(self) -> dict[str, Any]:
        return {"is_whole": self.is_whole, **asdict(self)}

    def render(self) -> str:
        """For a person."""
        lines = [
            f"{self.name}: {count(self.num_commits, 'commit')} of "
            f"{count(self.num_prompts, 'prompt')}, {count(self.num_rows, 'row')}, "
            f"{self.size_bytes / 1e6:.1f} MB, {count(self.num_snapshots, 'snapshot')}, "
            f"{count(self.num_orphans, 'file')} without a commit",
            *(f"damaged: {damage.reason}" for damage in self.damages),
        ]
        if self.damages:
            lines.append(
                f"{count(self.num_missing_rows, 'row')} cannot be used; "
                f"{count_are(self.num_quarantined, 'commit')} in quarantine"
            )
        if self.num_unreadable_records:
            lines.append(told_of_records(self.num_unreadable_records))
        return "\n".join(lines)


def verify(
    name: str | Path,
    *,
    quarantine: bool = False,
    on_segment: Callable[[int], None] | None = None,
) -> Verification:
    """Reads every record and every byte; of a bucket the objects themselves, not local copies.

    Args:
        name: a set, with `@sha256:<hex>` a snapshot of it: its commits alone.
        quarantine: note damaged commits, and remove the notes of those that are whole again.
        on_segment: called with the number of segments checked, commit by commit.

    Raises:
        TraceError: not a trace set, a header that cannot be read, or no such snapshot.
        TraceCorruptError: a snapshot one of whose commit records is gone.
        StoreError: a bucket that cannot be read.
    """
    where, snapshot = split_reference(name)
    place = open_place(where)
    header_digest = read_header(place).digest
    if quarantine:
        probe_bucket(place)
    log = read_commits(place, skip_damaged=True, allow_repeats=True)
    if snapshot is not None:
        log = at_snapshot(log, snapshot)
    commits = _in_use(log) if snapshot is None else list(log.commits)
    damages, keys = [*log.damages], RoundKeys(log.commits)
    for batch in batches(commits, lambda commit: sum(s.size_bytes for s in commit.files)):
        damages += _damages(place, batch, keys)
        if on_segment is not None:
            on_segment(sum(len(commit.files) for commit in batch))
    if quarantine:
        _note(place, commits, damages)
    damages += _header_damage(place, commits, header_digest) + note_damages(place)
    damages += [*_repeats(log), *keys.damages([prompt for prompt, _ in repeated(log.commits)])]
    if snapshot is None:
        damages += _broken_snapshots(log)
    return replace(_summed(log, damages), name=str(name))


def _header_damage(place: Place, commits: Iterable[Commit], header_digest: str) -> list[Damage]:
    try:
        check_header(place, commits, header_digest)
    except TraceError as error:
        return [Damage(HEADER_NAME, str(error))]
    return []


def _in_use(log: CommitLog) -> list[Commit]:
    """Commits of the set and of its snapshots; other superseded ones may be pruned already."""
    found = {commit.digest: commit for commit in log.commits}
    for digest in list_snapshots(log.place):
        try:
            found |= {commit.digest: commit for commit in at_snapshot(log, digest).commits}
        except TraceError:
            continue  # told by `_broken_snapshots`
    return list(found.values())


def _damages(place: Place, commits: Sequence[Commit], keys: RoundKeys) -> list[Damage]:
    """By digest first; what has the right bytes is then read, as they may never have been sound.

    Args:
        keys: takes those of what is sound.
    """
    reasons: dict[str, str] = {}
    with ExitStack() as copies:
        paths: dict[str, Path] = {}
        for segment in (segment for commit in commits for segment in commit.files):
            try:
                paths[segment.key] = _local_file(place, segment, copies)
            except TraceError as error:
                reasons[segment.key] = str(error)
        whole = [file for commit in commits for file in files_of(place, commit, paths)]
        for segment, where, reason in refusals(whole):
            reasons[segment.key] = f"{where}: {reason}"
        for commit in commits:
            for segment in commit.files:
                if segment.table == "rounds" and segment.key not in reasons:
                    keys.take(commit, paths[segment.key])
    return [
        Damage(segment.key, reasons[segment.key], commit.digest, commit.num_rows)
        for commit in commits
        for segment in commit.files
        if segment.key in reasons
    ]


def _local_file(place: Place, segment: Segment, copies: ExitStack) -> Path:
    """A segment whose digest is right; of a bucket the object's own bytes, fetched anew."""
    if place.root is None:
        return copies.enter_context(fresh_copy(place, segment))
    check_segment(place, segment, verify=True)
    return segment.path(place.root)


def _note(place: Place, commits: Iterable[Commit], damages: Iterable[Damage]) -> None:
    by_commit = {damage.commit: damage for damage in damages if damage.commit is not None}
    for damage in by_commit.values():
        put_in_quarantine(place, damage)
    for commit in read_quarantine(place).keys() & {commit.digest for commit in commits}:
        if commit not in by_commit:
            release(place, commit)


def _repeats(log: CommitLog) -> list[Damage]:
    return [
        Damage(f"prompt {prompt!r}", f"prompt {prompt!r} in {' and '.join(c.key for c in commits)}")
        for prompt, commits in repeated(log.commits)
    ]


def _broken_snapshots(log: CommitLog) -> list[Damage]:
    found = []
    for digest in list_snapshots(log.place):
        try:
            at_snapshot(log, digest)
        except TraceError as error:
            found.append(Damage(f"snapshot {digest}", str(error)))
    return found


def _summed(log: CommitLog, damages: list[Damage]) -> Verification:
    lost = {damage.commit: damage.num_rows or 0 for damage in damages if damage.commit}
    named = {segment.key for record in log.records for segment in record.files}
    return Verification(
        name=log.place.name,
        num_commits=len(log.commits),
        num_prompts=len(set(log.prompt_ids)),
        num_rows=sum(commit.num_rows for commit in log.commits),
        size_bytes=sum(segment.size_bytes for segment in log.segments),
        num_snapshots=len(list_snapshots(log.place)),
        num_orphans=len(set(log.place.keys("data")) - named),
        num_quarantined=len(read_quarantine(log.place)),
        num_missing_rows=sum(lost.values()),
        num_unreadable_records=unreadable_records(log),
        damages=tuple(damages),
    )
