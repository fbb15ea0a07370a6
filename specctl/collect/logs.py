"""The logs of all writers of a set, folded into what the set holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.collect.chains import RESTORE, Damage, check_header, list_records, read_chain
from specctl.collect.commits import Commit, Segment
from specctl.collect.header import read_header
from specctl.collect.places import Place, open_place
from specctl.collect.words import count
from specctl.errors import TraceCorruptError
from specctl.trace import TABLES


@dataclass(frozen=True)
class CommitLog:
    """What the writers of one set acknowledged.

    Attributes:
        commits: those whose rows are the set's, writer by writer.
        records: all that were read, with what was superseded and what only opens an epoch.
        damages: records that were left out, and compactions that do not hold what they supersede.
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
        skip_damaged: list damaged records instead of refusing them. The header is not looked at
            then: see `check_header`.
        allow_repeats: leave prompts that two commits hold to the caller.
        chains: writers whose logs were read just now, slot by slot: a listing may be behind them.

    Raises:
        TraceCorruptError: a record is damaged, missing, out of its chain or of another header, a
            compaction lost something, or a prompt is acknowledged twice.
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
    if damages is None and any(record.header_digest for record in records):
        check_header(place, records, read_header(place).digest)
    log = _folded(place, records, damages)
    if not allow_repeats:
        check_unique(log)
    return log


def _folded(place: Place, records: tuple[Commit, ...], damages: list[Damage] | None) -> CommitLog:
    """What the records amount to.

    A compaction that lost something is refused where `damages` is None, else told of. Where all
    records can be read it alone is to blame, and does not count.
    """
    faults = list(_compaction_faults(records))
    for record, reason in faults:
        if damages is None:
            raise _lossy(place, record, reason)
    left_out = () if damages else {record.digest for record, _ in faults}
    found = [
        Damage(record.key, str(_lossy(place, record, reason)), num_rows=0)
        for record, reason in faults
    ]
    commits = tuple(live_commits(records, left_out))
    return CommitLog(place, commits, records, (*(damages or ()), *found))


def _compaction_faults(records: Sequence[Commit]) -> Iterator[tuple[Commit, str]]:
    """Compactions that do not hold what they supersede, and what is wrong.

    An equal repeat of a prompt may be gone, as long as one commit in use has the prompt. A
    superseded commit may be unknown, where a listing was behind.
    """
    known = {record.digest: record for record in records}
    held = {prompt for commit in live_commits(records) for prompt in commit.prompt_ids}
    for record in records:
        if record.supersedes is None:
            continue
        digests = set(record.supersedes)
        fault = _fault(record, [known[digest] for digest in digests & known.keys()], held)
        is_complete = digests <= known.keys()
        if fault is None and is_complete:
            fault = _surplus(record, [known[digest] for digest in digests])
        if fault is not None:
            yield record, fault


def _fault(record: Commit, superseded: Sequence[Commit], held: set[str]) -> str | None:
    prompts = {prompt for commit in superseded for prompt in commit.prompt_ids}
    lost = prompts - held.union(record.prompt_ids)
    if lost:
        return f"no prompt {min(lost)!r}, which one of them has"
    return None


def _surplus(record: Commit, superseded: Sequence[Commit]) -> str | None:
    """What is wrong with prompts and rows where all superseded commits are known."""
    prompts = [prompt for commit in superseded for prompt in commit.prompt_ids]
    new = set(record.prompt_ids) - set(prompts)
    if new:
        return f"prompt {min(new)!r}, which none of them has"
    for table in TABLES:
        have, had = record.rows_of(table), sum(commit.rows_of(table) for commit in superseded)
        if have > had or (have < had and len(prompts) == len(record.prompt_ids)):
            return f"{have} rows of {table} instead of {had}"
    return None


def _lossy(place: Place, record: Commit, reason: str) -> TraceCorruptError:
    return TraceCorruptError(
        place.at(record.key),
        expected="what the commits that it supersedes hold",
        found=reason,
        fix=RESTORE,
    )


def unreadable_records(log: CommitLog) -> int:
    """Records that are damaged, and gaps; no segment of theirs is known."""
    return sum(damage.commit is None and damage.num_rows is None for damage in log.damages)


def told_of_records(num_records: int) -> str:
    """The same for a person."""
    return (
        f"{count(num_records, 'commit record')} or runs of them cannot be read: the prompts and "
        "rows that they acknowledged are not known, and missing besides"
    )


def live_commits(records: Sequence[Commit], left_out: Collection[str] = ()) -> Iterator[Commit]:
    """Those that acknowledge rows and that no other record supersedes.

    Args:
        left_out: digests of records that do not count.
    """
    counting = [record for record in records if record.digest not in left_out]
    superseded = {digest for record in counting for digest in record.supersedes or ()}
    for record in counting:
        if record.opens is None and record.digest not in superseded:
            yield record


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
