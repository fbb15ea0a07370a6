"""Reading trace sets: one listing, the footers, and the rows that count.

    rounds/*.parquet ─names─► records in the footers ─count_once─► segments ─► files ─► rows

A file below `rounds/` is the only sign that its prompts are finished. Which rows count, and those
of prompts that span segments, is the subject of `whole_prompts`.
"""

from __future__ import annotations

import atexit
import hashlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from specctl.errors import (
    TraceCorruptError,
    TraceError,
    TraceMismatchError,
    TraceSchemaError,
    UsageError,
)
from specctl.formatting import count
from specctl.logs.parquet import Tables, collected, decoding, join_tables, read_tables, scan_files
from specctl.logs.row_checks import check_keys
from specctl.logs.segment_files import fetch_all, local_file
from specctl.logs.trace_files import (
    NEWER,
    NODES,
    RECORD_KEY,
    ROUNDS,
    SNAPSHOTS,
    SOURCE,
    Place,
    Segment,
    SegmentRecord,
    StoredFile,
    TraceHeader,
    check_equal,
    check_header_digest,
    open_place,
    parse_record,
    parse_segment_key,
    read_header,
    split_reference,
)
from specctl.logs.whole_prompts import batches, count_once, counted_tables, lost_rows
from specctl.records import canonical_json, describe_violation
from specctl.stores import KeyAbsentError
from specctl.trace import TABLES, schema_id

if TYPE_CHECKING:
    import polars as pl

    from specctl.artifacts.manifest import Domain, PairFingerprint
    from specctl.ray_cluster import Spread

_SNAPSHOT_KEY = re.compile(rf"{SNAPSHOTS}/(?P<hex>[0-9a-f]{{64}})\.txt")
_TOGETHER = "name sets of one pair, sampling and treatment of token ids"


@dataclass(frozen=True)
class Damage:
    """A segment, or another file, that was left out.

    Attributes:
        what: its key. num_rows: rows that are missing with it, None where that is unknown.
    """

    what: str
    reason: str
    num_rows: int | None = None


@dataclass(frozen=True)
class Listing:
    """The segments of one set, at one moment or in one snapshot.

    Attributes:
        segments: in order of their names; what does not count is marked.
        damages: what was left out.
        unfinished: rows of unfinished prompts are read too.
    """

    place: Place
    header: TraceHeader
    segments: tuple[Segment, ...]
    damages: tuple[Damage, ...] = ()
    unfinished: bool = False

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        """Finished prompts, each once, and behind them unfinished ones where they are read."""
        finished = (prompt for segment in self.segments for prompt in segment.prompt_ids)
        return (*finished, *(self.unfinished_ids if self.unfinished else ()))

    @cached_property
    def unfinished_ids(self) -> tuple[str, ...]:
        """Prompts with rows in some segments that no segment finishes, sorted."""
        records = [segment.record for segment in self.segments]
        opened = {prompt for record in records for prompt in record.open_ids}
        for segment in self.segments if opened else ():
            opened -= segment.broken.union(segment.record.prompt_ids)
        return tuple(sorted(opened))

    @property
    def num_repeats(self) -> int:
        """Times that a writer finished a prompt that an earlier segment has."""
        return sum(len(segment.repeats) for segment in self.segments)

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the snapshot of these segments."""
        return snapshot_digest(self.segments)

    def paths(self, segment: Segment) -> dict[str, Path]:
        """Local files of a segment by table, as they are stored; tables without rows are left out.

        Raises:
            As `local_file`.
        """
        files = segment.files.items()
        return {table: local_file(self.place, file, verify=False) for table, file in files}

    def tables(self, segment: Segment) -> Tables:
        """All rows of a segment.

        Raises:
            As `local_file` and `read_tables`.
        """
        return read_tables(self.paths(segment))


def read_listing(
    reference: str | Path, *, verify: bool = True, skip_damaged: bool = False, fresh: bool = False
) -> Listing:
    """The segments of `TRACES` as they are now, of `TRACES@sha256:<hex>` as they were frozen, or of
    `TRACES@2026-01-31T12:00:00` those published since, by the clock of their writers.

    Args:
        verify: digest the nodes files; else only their sizes are checked, and of a bucket nothing.
            Rounds files are always digested.
        skip_damaged: list damaged segments instead of refusing them.
        fresh: read a bucket's objects again, whatever copies there are.

    Raises:
        TraceError: not a trace set, or no such snapshot.
        TraceSchemaError: another version, or other columns.
        TraceCorruptError: damage, naming the file.
        TraceMismatchError: a time amid prompts.
        StoreError: a bucket that cannot be read.
    """
    name, part = split_reference(reference)
    is_frozen = part is not None and part.startswith("sha256:")
    place = open_place(name)
    header = read_header(place)
    keys = read_snapshot(place, str(part)) if is_frozen else place.keys(ROUNDS)
    if part is not None and not is_frozen:
        first = f"{ROUNDS}/{re.sub('[-:]', '', part).replace(' ', 'T')}"
        keys = [key for key in keys if key >= first]
    files: list[StoredFile] = []
    found: list[Segment] = []
    segments: list[Segment] = []
    damages: list[Damage] = []

    @contextmanager
    def judging(key: str, num_rows: int | None = None) -> Iterator[None]:
        """Lists damage, or refuses it."""
        try:
            yield
        except TraceCorruptError as error:
            if not skip_damaged:
                raise
            damages.append(Damage(key, str(error), num_rows))

    for key in keys:
        with judging(key):
            files.append(StoredFile(key, parse_segment_key(place.at(key), key)[1]))
    if not fresh:
        fetch_all(place, files)
    for file in files:
        with judging(file.key):
            found.append(_read_segment(place, file, fresh=fresh))
    if verify and not fresh:
        fetch_all(place, (one.files[NODES] for one in found if NODES in one.files))
    for segment in found:
        with judging(segment.key, segment.num_rows):
            if NODES in segment.files and (verify or place.root is not None):
                local_file(place, segment.files[NODES], verify=verify, fresh=fresh)
            check_header_digest(place, header, segment)
            segments.append(segment)
    counted = count_once(segments)
    lost = list(lost_rows(place, counted))
    if lost and part is not None and not is_frozen:
        raise TraceMismatchError(
            f"trace set {reference}",
            expected="prompts whose rows are all of that time, as of a dense log",
            found=f"{count(len(lost), 'segment')} with rounds of prompts that began before",
            fix=f"read {name} as a whole",
        )
    if lost and part is None and place.keys(ROUNDS) != keys:
        # A segment that was published during the listing may be missing, and the next one there.
        return read_listing(reference, verify=verify, skip_damaged=skip_damaged, fresh=fresh)
    for key, error in lost:
        with judging(key):
            raise error
    return Listing(place, header, counted, tuple(damages))


def _read_segment(place: Place, file: StoredFile, *, fresh: bool) -> Segment:
    import pyarrow.parquet as pq

    where = place.at(file.key)
    path = local_file(place, file, fresh=fresh)
    with decoding(where):
        footer = pq.read_metadata(path)
    metadata = footer.metadata or {}
    found = metadata.get(b"specctl.schema_id", b"none").decode(errors="replace")
    if found != schema_id("rounds"):
        expected = f"schema {schema_id('rounds')[:19]}…"
        raise TraceSchemaError(where, expected=expected, found=f"{found[:19]}…", fix=NEWER)
    record = parse_record(where, metadata.get(RECORD_KEY, b""), SegmentRecord)
    size = path.stat().st_size + (record.nodes.size_bytes if record.nodes else 0)
    return Segment(PurePosixPath(file.key).stem, record, footer.num_rows, size)


# --------------------------------------------------------------------------- snapshots


def snapshot_text(segments: Iterable[Segment]) -> bytes:
    """The names of segments, one a line, sorted: they hold the digests of the rounds files."""
    return "\n".join(sorted(segment.name for segment in segments)).encode()


def snapshot_digest(segments: Iterable[Segment]) -> str:
    """`sha256:<hex>` of segments in any order: the identity of their rows."""
    return "sha256:" + hashlib.sha256(snapshot_text(segments)).hexdigest()


def snapshot_key(digest: str) -> str:
    """Where a snapshot is stored."""
    return f"{SNAPSHOTS}/{digest.removeprefix('sha256:')}.txt"


def list_snapshots(place: Place) -> list[str]:
    """Digests of all snapshots of a set."""
    found = map(_SNAPSHOT_KEY.fullmatch, place.keys(SNAPSHOTS))
    return ["sha256:" + one["hex"] for one in found if one is not None]


def read_snapshot(place: Place, digest: str) -> list[str]:
    """Keys of the rounds files of a snapshot.

    Raises:
        TraceError: the set has no such snapshot.
        TraceCorruptError: its text is not the one that its name is the digest of.
    """
    where = place.at(snapshot_key(digest))
    try:
        content = place.read(snapshot_key(digest))
    except KeyAbsentError as error:
        raise TraceError(
            f"trace set {place.name}, snapshot {digest}",
            expected="one of its snapshots",
            found="none of that name",
            fix="list them with `specctl traces snapshot TRACES --list`",
        ) from error
    if "sha256:" + hashlib.sha256(content).hexdigest() != digest:
        raise TraceCorruptError(
            where,
            expected="the text that its name is the digest of",
            found=f"{len(content)} other bytes",
            fix="restore the file",
        )
    keys = [f"{ROUNDS}/{name}.parquet" for name in content.decode("ascii", "replace").split()]
    for key in keys:
        parse_segment_key(where, key)
    return keys


# --------------------------------------------------------------------------- sets as one


@dataclass(frozen=True)
class TraceSet:
    """One or more trace sets, read as one: whole prompts alone, unless told otherwise.

    Attributes:
        parts: set by set.
        spread: reads a dense log by tasks of a cluster; None for this process.
    """

    parts: tuple[Listing, ...]
    spread: Spread | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        names = ", ".join(part.place.name for part in self.parts)
        return f"TraceSet({names!r}, {len(self.prompt_ids)} prompts)"

    @classmethod
    def open(
        cls,
        *sets: str | Path,
        verify: bool = True,
        skip_damaged: bool = False,
        unfinished: bool = False,
    ) -> TraceSet:
        """Opens sets whose rows follow the same distributions, as they are at this moment.

        Args:
            sets: folders or `s3://bucket/prefix`; `SET@sha256:<hex>` opens that snapshot of it.
            verify: digest every file and check the keys of all rows; else only the rounds files
                are digested, and sizes checked.
            skip_damaged: leave out damaged segments and list them in `damages`.
            unfinished: read also what there is of prompts that no segment finishes.

        Raises:
            TraceError: not a trace set, or no such snapshot.
            TraceSchemaError: another version, or other columns.
            TraceCorruptError: a file is missing, truncated or altered, or a row counts twice.
            TraceMismatchError: sets of different pairs or sampling, or that share prompts.
            StoreError: a bucket that cannot be read.
        """
        if not sets:
            raise UsageError("traces", expected="a folder", found="none", fix="name one")
        parts = tuple(
            replace(
                read_listing(name, verify=verify, skip_damaged=skip_damaged), unfinished=unfinished
            )
            for name in sets
        )
        for part in parts:
            check_equal(part.place, part.header, parts[0].header, SOURCE, _TOGETHER)
        _check_disjoint(parts)
        traces = cls(parts)
        if verify:
            name = " + ".join(part.place.name for part in parts)
            check_keys(f"trace set {name}", traces.segment_files(), traces.prompt_ids)
        return traces

    @property
    def header(self) -> TraceHeader:
        """Of the first set; everything that makes rows comparable is equal in all."""
        return self.parts[0].header

    @property
    def headers(self) -> tuple[TraceHeader, ...]:
        """Set by set."""
        return tuple(part.header for part in self.parts)

    @cached_property
    def prompt_ids(self) -> tuple[str, ...]:
        """Prompts whose rows are read, sorted."""
        return tuple(sorted(prompt for part in self.parts for prompt in part.prompt_ids))

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the rows, whatever the set is called: that of their snapshot.

        With unfinished prompts these are other rows than the snapshot's, and it is another digest.
        """
        text = snapshot_text(segment for part in self.parts for segment in part.segments)
        text += b"\nunfinished" if any(part.unfinished for part in self.parts) else b""
        return "sha256:" + hashlib.sha256(text).hexdigest()

    @property
    def snapshots(self) -> tuple[str, ...]:
        """`sha256:<hex>` of each set's own snapshot, set by set."""
        return tuple(part.digest for part in self.parts)

    @property
    def damages(self) -> tuple[Damage, ...]:
        """Segments that were left out, where `open` skips damage."""
        return tuple(damage for part in self.parts for damage in part.damages)

    @property
    def fingerprint(self) -> PairFingerprint:
        """The pair that the traces came from.

        Raises:
            TraceMismatchError: collected without a drafter.
        """
        from specctl.artifacts.manifest import PairFingerprint

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
        """The rows of `rounds` or `nodes` that count, lazily: nothing is read before `collect`.

        `specctl.logs.parquet.collected` reads it and refuses files that cannot be decoded; errors
        of the frame's own `collect` are polars'.
        """
        if table not in TABLES:
            raise UsageError(
                "trace table", expected=" or ".join(TABLES), found=repr(table), fix="name one"
            )
        return scan_files(table, [files[table] for files in self._files if table in files])

    def num_rows(self, table: str) -> int:
        """Rows of a table that count, from the footers alone."""
        import pyarrow.parquet as pq

        paths = [files[table] for files in self._files if table in files]
        return sum(pq.read_metadata(path).num_rows for path in paths)

    def segment_files(self) -> list[dict[str, Path]]:
        """The files of each table with the rows that count, in order of the segments.

        Nodes stand in the order of their rounds. Segments without rows are left out, and those of
        which not all rows count, or of prompts that span several, are copied, some to a file.
        """
        return self._files

    def summary(self) -> dict[str, Any]:
        """Counts for a person: segments, prompts, repeats, unfinished prompts, requests, rounds,
        nodes, bytes."""
        import polars as pl

        rounds = self.scan("rounds").select(
            num_requests=pl.col("request_id").n_unique(),
            num_emitted=pl.col("num_emitted").sum(),
            num_accepted=pl.col("num_accepted").sum(),
        )
        return {
            "num_segments": sum(len(part.segments) for part in self.parts),
            "num_prompts": len(self.prompt_ids),
            "num_repeats": sum(part.num_repeats for part in self.parts),
            "num_unfinished": sum(len(part.unfinished_ids) for part in self.parts),
            **{f"num_{name}": self.num_rows(name) for name in TABLES},
            **collected(rounds).row(0, named=True),
            "size_bytes": sum(one.size_bytes for part in self.parts for one in part.segments),
        }

    @cached_property
    def _files(self) -> list[dict[str, Path]]:
        found: list[dict[str, Path]] = []
        for part in self.parts:
            unfinished = part.unfinished_ids if part.unfinished else ()
            counted = counted_tables(part.segments, part.tables, unfinished)
            for is_stored, run in groupby(counted, lambda pair: pair[1] is None):
                if is_stored:
                    found += (part.paths(segment) for segment, _ in run)
                else:
                    found += map(self._copied, batches(tables or {} for _, tables in run))
        return [paths for paths in found if paths]

    def _copied(self, parts: Sequence[Tables]) -> dict[str, Path]:
        """Files of the process's own, with some rows that count."""
        import pyarrow.parquet as pq

        copies = {}
        for table, rows in join_tables(parts).items():
            if len(rows):
                copies[table] = self._scratch / f"{table}-{uuid.uuid4().hex}.parquet"
                pq.write_table(rows, copies[table])
        return copies

    @cached_property
    def _scratch(self) -> Path:
        """A folder for the life of the process: readers keep paths, not this object."""
        folder = Path(tempfile.mkdtemp(prefix="specctl-traces-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder


def _check_disjoint(parts: Sequence[Listing]) -> None:
    """Refuses a prompt in two sets: it would be counted twice, and its rounds share their keys."""
    owner: dict[str, Listing] = {}
    for part in parts:
        for prompt in part.prompt_ids:
            first = owner.setdefault(prompt, part)
            if first is not part:
                raise TraceMismatchError(
                    f"trace set {part.place.name}",
                    expected="prompts that no other set holds",
                    found=f"prompt {prompt!r}, which {first.place.name} holds too",
                    fix="make one set of them with `specctl traces merge`",
                )


# --------------------------------------------------------------------------- domain


def domain_of(traces: TraceSet) -> Domain:
    """The domain of evidence that is fitted from traces: what headers record and rows show.

    Sets of several machines give all of them; anything else that differs is unknown. Batch sizes
    are those of live rows: no requests share a position of a dense log.

    Raises:
        TraceSchemaError: a header whose domain has other fields.
    """
    import polars as pl

    from specctl.artifacts import Domain
    from specctl.artifacts.manifest import Range

    domains = [_recorded_domain(header) for header in traces.headers]
    merged: dict[str, Any] = {}
    for name in Domain.model_fields:
        values = [getattr(domain, name) for domain in domains]
        merged[name] = values[0] if all(value == values[0] for value in values) else None
    machines = [domain.hardware for domain in domains]
    if None not in machines:
        merged["hardware"] = tuple(sorted({name for names in machines for name in names or ()}))
    is_live = pl.col("kind").cast(pl.String) == "live"
    batch_sizes = pl.col("batch_size").filter(is_live)
    for column in (batch_sizes, pl.col("context_tokens")):
        ends = traces.scan("rounds").select(low=column.min(), high=column.max())
        low, high = collected(ends).row(0)
        merged[column.meta.output_name()] = None if low is None else Range(low=low, high=high)
    return Domain(**merged)


def _recorded_domain(header: TraceHeader) -> Domain:
    """Imported traces record at most the number format."""
    from pydantic import ValidationError

    from specctl.artifacts import Domain

    stated = header.collect.get("domain") or {"dtype": header.collect.get("dtype")}
    try:
        return Domain.model_validate_json(canonical_json(stated))
    except ValidationError as error:
        raise TraceSchemaError(
            "trace.json, collect.domain",
            expected="the fields of docs/artifact-format.md, domain",
            found=describe_violation(error),
            fix=NEWER,
        ) from error
