"""Reading trace sets: committed rows only, after checking that they are what was committed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.artifacts.manifest import PairFingerprint
from specctl.collect.commits import CommitLog, check_segment, read_commits
from specctl.collect.header import TraceHeader, check_same_source, read_header
from specctl.errors import TraceCorruptError, TraceMismatchError, UsageError
from specctl.trace import TABLES, arrow_schema

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class TraceSet:
    """One or more trace folders, read as one.

    Attributes:
        headers: folder by folder.
        logs: what was committed, folder by folder.
    """

    headers: tuple[TraceHeader, ...]
    logs: tuple[CommitLog, ...]

    @classmethod
    def open(cls, *paths: str | Path, verify: bool = True) -> TraceSet:
        """Opens folders whose rows follow the same laws.

        Args:
            verify: digest every file and look for duplicate rounds; without it only names and sizes
                are checked.

        Raises:
            TraceError: not a trace folder.
            TraceSchemaError: another version, or other columns.
            TraceCorruptError: a file or record is missing, truncated, altered or double.
            TraceMismatchError: folders of different pairs or sampling, or that share prompts.
        """
        if not paths:
            raise UsageError("traces", expected="a folder", found="none", fix="name one")
        roots = [Path(path) for path in paths]
        headers = [read_header(root) for root in roots]
        for root, header in zip(roots, headers, strict=True):
            check_same_source(root, header, headers[0])
        traces = cls(tuple(headers), tuple(read_commits(root) for root in roots))
        _check_disjoint(traces.logs)
        traces._check_files(verify=verify)
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
        """`sha256:<hex>` over all commits: identity of the rows, whatever the folder is called."""
        digests = sorted(commit.digest for log in self.logs for commit in log.commits)
        return "sha256:" + hashlib.sha256("\n".join(digests).encode()).hexdigest()

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
        """The committed rows of `rounds` or `nodes`, lazily: nothing is read before `collect`."""
        import polars as pl

        if table not in TABLES:
            raise UsageError(
                "trace table", expected=" or ".join(TABLES), found=repr(table), fix="name one"
            )
        paths = self._paths(table)
        if paths:
            return pl.scan_parquet(paths, glob=False)
        return pl.from_arrow(arrow_schema(table).empty_table()).lazy()  # type: ignore[union-attr]

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
            **rounds.collect().row(0, named=True),
            "size_bytes": sum(segment.size_bytes for segment in segments),
        }

    def commit_files(self) -> list[dict[str, Path]]:
        """Commit by commit, the file of each table; its nodes stand in the order of its rounds.

        Commits of prompts that gave no round are left out.
        """
        commits = [(log.root, commit) for log in self.logs for commit in log.commits]
        return [{f.table: f.path(root) for f in c.files} for root, c in commits if c.files]

    def _paths(self, table: str) -> list[Path]:
        return [s.path(log.root) for log in self.logs for s in log.segments if s.table == table]

    def _check_files(self, *, verify: bool) -> None:
        for log in self.logs:
            for segment in log.segments:
                check_segment(log.root, segment, verify=verify)
        if verify:
            self._check_keys()

    def _check_keys(self) -> None:
        import polars as pl

        key = ("request_id", "round_idx")
        twice = self.scan("rounds").group_by(key).len().filter(pl.col("len") > 1).head(1).collect()
        if len(twice):
            raise TraceCorruptError(
                f"{self.logs[0].root}, table rounds",
                expected="each (request_id, round_idx) once",
                found=f"{twice.row(0)[:2]} twice",
                fix="collect into a new folder",
            )


def _check_disjoint(logs: Iterable[CommitLog]) -> None:
    """One prompt in two folders would be counted twice, and its rounds share their keys."""
    owner: dict[str, CommitLog] = {}
    for log in logs:
        for prompt in log.prompt_ids:
            first = owner.setdefault(prompt, log)
            if first is not log:
                raise TraceMismatchError(
                    f"trace folder {log.root}",
                    expected="prompts that no other folder holds",
                    found=f"prompt {prompt!r}, which {first.root} holds too",
                    fix="open these folders one at a time",
                )
