"""Reading trace sets: committed rows only, after checking that they are what was committed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.artifacts.manifest import PairFingerprint
from specctl.collect.chains import Damage
from specctl.collect.files import segment_path
from specctl.collect.header import TraceHeader, read_header
from specctl.collect.keys import check_keys, scan_files
from specctl.collect.logs import CommitLog
from specctl.collect.opening import Damaged, open_log
from specctl.collect.places import open_place, split_reference
from specctl.collect.same_run import check_same_source
from specctl.collect.snapshots import snapshot_digest
from specctl.errors import TraceMismatchError, UsageError
from specctl.parquet import collected
from specctl.trace import TABLES

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class TraceSet:
    """One or more trace sets, read as one.

    Attributes:
        headers: set by set.
        logs: what was committed, set by set.
    """

    headers: tuple[TraceHeader, ...]
    logs: tuple[CommitLog, ...]

    @classmethod
    def open(cls, *sets: str | Path, verify: bool = True, damaged: Damaged = "refuse") -> TraceSet:
        """Opens sets whose rows follow the same laws, as they are at this moment.

        Args:
            sets: folders or `s3://bucket/prefix`; `SET@sha256:<hex>` opens that snapshot of it.
            verify: digest every file and check the keys of all rows; without it only names and
                sizes are checked.
            damaged: what to do about damage: `skip` leaves out whole commits and lists them.

        Raises:
            TraceError: not a trace set, or no such snapshot.
            TraceSchemaError: another version, or other columns.
            TraceCorruptError: a file or record is missing, truncated, altered or double.
            TraceMismatchError: sets of different pairs or sampling, or that share prompts.
            StoreError: a bucket that cannot be read.
        """
        if not sets:
            raise UsageError("traces", expected="a folder", found="none", fix="name one")
        places = [open_place(split_reference(name)[0]) for name in sets]
        headers = [read_header(place) for place in places]
        for place, header in zip(places, headers, strict=True):
            check_same_source(place, header, headers[0])
        logs = tuple(open_log(name, verify=verify, damaged=damaged) for name in sets)
        traces = cls(tuple(headers), logs)
        _check_disjoint(logs)
        if verify:
            check_keys(logs)
        return traces

    @property
    def header(self) -> TraceHeader:
        """Of the first folder; what makes rows comparable is equal in all."""
        return self.headers[0]

    @cached_property
    def prompt_ids(self) -> tuple[str, ...]:
        """Finished prompts, sorted."""
        return tuple(sorted(prompt for log in self.logs for prompt in log.prompt_ids))

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the rows, whatever the set is called: that of their snapshot."""
        return snapshot_digest(commit for log in self.logs for commit in log.commits)

    @property
    def snapshots(self) -> tuple[str, ...]:
        """`sha256:<hex>` of each set's own snapshot, set by set."""
        return tuple(snapshot_digest(log.commits) for log in self.logs)

    @property
    def damages(self) -> tuple[Damage, ...]:
        """What was left out, where `open` was told to skip."""
        return tuple(damage for log in self.logs for damage in log.damages)

    @property
    def fingerprint(self) -> PairFingerprint:
        """The pair that the traces came from.

        Raises:
            TraceMismatchError: collected without a drafter.
        """
        header = self.header
        if header.drafter_digest is None:
            raise TraceMismatchError(
                "traces",
                expected="a drafter",
                found="plain decoding",
                fix="collect again with --drafter",
            )
        return PairFingerprint(
            target_digest=header.target_digest,
            drafter_digest=header.drafter_digest,
            tokenizer_digest=header.tokenizer_digest,
            target=str(header.collect.get("target", "unnamed")),
            drafter=str(header.collect.get("drafter", "unnamed")),
        )

    def scan(self, table: str) -> pl.LazyFrame:
        """The committed rows of `rounds` or `nodes`, lazily: nothing is read before `collect`.

        `specctl.parquet.collected` reads it and refuses what cannot be decoded; of the frame's own
        `collect` the errors are polars'.
        """
        if table not in TABLES:
            raise UsageError(
                "trace table", expected=" or ".join(TABLES), found=repr(table), fix="name one"
            )
        return scan_files(table, self._paths(table))

    def num_rows(self, table: str) -> int:
        """Committed rows of a table, from the commit records alone."""
        return sum(s.num_rows for log in self.logs for s in log.segments if s.table == table)

    def summary(self) -> dict[str, Any]:
        """Counts for a person: prompts, requests, rounds, nodes, tokens, bytes, commits."""
        import polars as pl

        rounds = self.scan("rounds").select(
            num_requests=pl.col("request_id").n_unique(),
            num_emitted=pl.col("num_emitted").sum(),
            num_accepted=pl.col("num_accepted").sum(),
        )
        segments = [segment for log in self.logs for segment in log.segments]
        rows = {name: self.num_rows(name) for name in TABLES}
        return {
            "num_commits": sum(len(log.commits) for log in self.logs),
            "num_prompts": len(self.prompt_ids),
            **{f"num_{name}": count for name, count in rows.items()},
            **collected(rounds).row(0, named=True),
            "size_bytes": sum(segment.size_bytes for segment in segments),
        }

    def commit_files(self) -> list[dict[str, Path]]:
        """Commit by commit, the file of each table; its nodes stand in the order of its rounds.

        Commits of prompts that gave no round are left out.
        """
        commits = [(log.place, commit) for log in self.logs for commit in log.commits]
        return [{f.table: segment_path(at, f) for f in c.files} for at, c in commits if c.files]

    def _paths(self, table: str) -> list[Path]:
        return [
            segment_path(log.place, segment)
            for log in self.logs
            for segment in log.segments
            if segment.table == table
        ]


def _check_disjoint(logs: Iterable[CommitLog]) -> None:
    """One prompt in two folders would be counted twice, and its rounds share their keys."""
    owner: dict[str, CommitLog] = {}
    for log in logs:
        for prompt in log.prompt_ids:
            first = owner.setdefault(prompt, log)
            if first is not log:
                raise TraceMismatchError(
                    f"trace set {log.place.name}",
                    expected="prompts that no other set holds",
                    found=f"prompt {prompt!r}, which {first.place.name} holds too",
                    fix="make one set of them with `specctl traces merge`",
                )
