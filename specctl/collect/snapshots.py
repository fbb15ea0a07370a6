"""Frozen states of a set: the digests of its commits, named by the digest of that list.

A snapshot is a text of commit digests, sorted, one a line. Its name is also `TraceSet.digest`, what
an artifact says it was fitted to, so `TRACES@sha256:...` opens the rows of that fit for as long as
their files are kept, whatever writers and compactions did since.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specctl.collect.commits import Commit
from specctl.collect.logs import CommitLog, check_unique, told_of_records, unreadable_records
from specctl.collect.places import COMMITS, SNAPSHOTS, Place
from specctl.collect.words import count, count_are
from specctl.errors import TraceCorruptError, TraceError, UsageError
from specctl.stores import KeyAbsentError
from specctl.stores.creating import ensure

_TEXT = re.compile(r"(sha256:[0-9a-f]{64}(\nsha256:[0-9a-f]{64})*)?")
_KEY = re.compile(rf"{SNAPSHOTS}/(?P<hex>[0-9a-f]{{64}})\.txt")


def snapshot_digest(commits: Iterable[Commit]) -> str:
    """`sha256:<hex>` over commits in any order: identity of their rows."""
    return "sha256:" + hashlib.sha256(_text(commits)).hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """One that was taken.

    Attributes:
        reference: what opens it. num_missing_rows: of both tables, in damaged commits.
        num_unreadable_records: damaged records and gaps; what they held nobody knows.
        num_excluded_rows: of commits that the user left out. num_excluded_prompts: of theirs,
            those that no other commit holds.
    """

    digest: str
    reference: str
    num_commits: int
    num_prompts: int
    num_missing_rows: int
    num_unreadable_records: int
    num_excluded_prompts: int = 0
    num_excluded_rows: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        """For a person."""
        held = f"{count(self.num_commits, 'commit')} of {count(self.num_prompts, 'prompt')}"
        lines = [f"{held}:", self.reference]
        if self.num_missing_rows:
            rows = count_are(self.num_missing_rows, "row")
            lines.append(f"{rows} missing, of damaged commits")
        if self.num_unreadable_records:
            lines.append(told_of_records(self.num_unreadable_records))
        if self.num_excluded_rows or self.num_excluded_prompts:
            lines.append(
                f"left out as asked: {count(self.num_excluded_rows, 'row')}, and "
                f"{count(self.num_excluded_prompts, 'prompt')} that no other commit has"
            )
        return "\n".join(lines)


def take_snapshot(log: CommitLog, excluded: Sequence[Commit] = ()) -> Snapshot:
    """Freezes what a log holds. Taking one twice is the same.

    Args:
        excluded: commits that were left out of the log by choice, to be told of.

    Raises:
        StoreError: it cannot be stored.
    """
    digest = snapshot_digest(log.commits)
    ensure(log.place.store, _key(digest), _text(log.commits))
    return Snapshot(
        digest=digest,
        reference=f"{log.place.name}@{digest}",
        num_commits=len(log.commits),
        num_prompts=len(log.prompt_ids),
        num_missing_rows=sum(damage.num_rows or 0 for damage in log.damages),
        num_unreadable_records=unreadable_records(log),
        num_excluded_prompts=len(
            {p for commit in excluded for p in commit.prompt_ids} - set(log.prompt_ids)
        ),
        num_excluded_rows=sum(commit.num_rows for commit in excluded),
    )


def exclude(log: CommitLog, names: Sequence[str]) -> tuple[CommitLog, list[Commit]]:
    """The log without some commits, and these; no prompt may stand twice in what is left.

    Args:
        log: opened with `allow_repeats`. names: `sha256:<hex>`, or how messages name a record.

    Raises:
        UsageError: a name of no commit that the set uses.
        TraceCorruptError: a prompt still stands in two commits.
    """
    excluded = [_named(log, name) for name in dict.fromkeys(names)]
    digests = {commit.digest for commit in excluded}
    kept = tuple(commit for commit in log.commits if commit.digest not in digests)
    left = replace(log, commits=kept)
    check_unique(left)
    return left, [commit for commit in log.commits if commit.digest in digests]


def _named(log: CommitLog, name: str) -> Commit:
    for commit in log.commits:
        if name in (commit.digest, commit.key, log.place.at(commit.key)):
            return commit
    raise UsageError(
        "--without",
        expected=f"one of the {len(log.commits)} commits in use, as {COMMITS}/<writer>/<seq>.json "
        "or sha256:<hex>",
        found=repr(name),
        fix="copy it from the message that names two commits",
    )


def read_snapshot(place: Place, digest: str) -> frozenset[str]:
    """Digests of the commits of a snapshot.

    Raises:
        TraceError: the set has no such snapshot.
        TraceCorruptError: its text is not what its name says.
    """
    try:
        content = place.read(_key(digest))
    except KeyAbsentError as error:
        raise TraceError(
            f"trace set {place.name}, snapshot {digest}",
            expected="one of its snapshots",
            found="none of that name",
            fix="list them with `specctl traces snapshot TRACES --list`",
        ) from error
    text = content.decode("ascii", "replace")
    if "sha256:" + hashlib.sha256(content).hexdigest() != digest or not _TEXT.fullmatch(text):
        raise TraceCorruptError(
            place.at(_key(digest)),
            expected="the text that its name is the digest of",
            found=f"{len(content)} other bytes",
            fix="restore the file",
        )
    return frozenset(text.split())


def list_snapshots(place: Place) -> list[str]:
    """Digests of all snapshots of a set, in no order that means anything."""
    found = map(_KEY.fullmatch, place.keys(SNAPSHOTS))
    return ["sha256:" + one["hex"] for one in found if one is not None]


def at_snapshot(log: CommitLog, digest: str) -> CommitLog:
    """The log as a snapshot froze it.

    Args:
        log: all records that could be read.

    Raises:
        TraceError: no such snapshot.
        TraceCorruptError: a commit of it is not there any more.
    """
    wanted = read_snapshot(log.place, digest)
    commits = tuple(record for record in log.records if record.digest in wanted)
    if len(commits) < len(wanted):
        missing = min(wanted - {commit.digest for commit in commits})
        raise TraceCorruptError(
            f"trace set {log.place.name}, snapshot {digest[:19]}…",
            expected=f"{len(wanted)} commits",
            found=f"{len(commits)}, e.g. without {missing[:19]}…",
            fix="restore the missing or altered commit record, or remove the snapshot's file, if "
            "nothing was fitted to it",
        )
    return replace(log, commits=commits, damages=())


def _key(digest: str) -> str:
    return f"{SNAPSHOTS}/{digest.removeprefix('sha256:')}.txt"


def _text(commits: Iterable[Commit]) -> bytes:
    return "\n".join(sorted(commit.digest for commit in commits)).encode()
