"""Reading trace sets: one listing, the footers, and the rows.

    rounds/*.parquet ─names─► records in the footers ─count_once─► segments ─► files ─► rows

A file below `rounds/` marks its prompts as finished and holds all their rows. A prompt that two
writers finished belongs to the segment whose name comes first, so all readers of the same files
agree.
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
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from specctl.errors import (
    TraceCorruptError,
    TraceError,
    TraceMismatchError,
    TraceSchemaError,
    UsageError,
    check_choice,
)
from specctl.logs.parquet import Tables, collected, decoding, drop_prompts, read_tables, scan_files
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
from specctl.records import canonical_json, describe_violation
from specctl.stores import KeyAbsentError
from specctl.trace import TABLES, schema_id

if TYPE_CHECKING:
    import polars as pl

    from specctl.artifacts.manifest import Domain, PairFingerprint

_SNAPSHOT_KEY = re.compile(rf"{SNAPSHOTS}/(?P<hex>[0-9a-f]{{64}})\.txt")
_TOGETHER = "name sets of one pair, sampling and treatment of token ids"


@dataclass(frozen=True)
class Damage:
    """A segment, or another file, that was left out."""

    what: str  # its key
    reason: str
    num_rows: int | None = None  # rows lost with it; None if unknown


@dataclass(frozen=True)
class Listing:
    """The segments of one set, at one moment or in one snapshot."""

    place: Place
    header: TraceHeader
    segments: tuple[Segment, ...]  # in order of their names, repeated prompts marked
    damages: tuple[Damage, ...] = ()

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        """Prompts, each once."""
        return tuple(prompt for segment in self.segments for prompt in segment.prompt_ids)

    @property
    def num_repeats(self) -> int:
        """Prompts in segments other than their own, counted once a segment."""
        return sum(len(segment.repeats) for segment in self.segments)

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the snapshot of these segments."""
        return snapshot_digest(self.segments)

    def paths(self, segment: Segment) -> dict[str, Path]:
        """Local files of a segment as stored, by table; tables without rows are absent."""
        files = segment.files.items()
        return {table: local_file(self.place, file, verify=False) for table, file in files}

    def tables(self, segment: Segment) -> Tables:
        """All rows of a segment."""
        return read_tables(self.paths(segment))


def read_listing(
    reference: str | Path, *, verify: bool = True, skip_damaged: bool = False, fresh: bool = False
) -> Listing:
    """The segments of `TRACES` as it is now, of the snapshot `TRACES@sha256:<hex>`, or those that
    were published since `TRACES@2026-01-31T12:00:00`, by the clock of their writers.

    Args:
        verify: digest the nodes files; else check the sizes of local ones. Rounds files are always
            digested.
        skip_damaged: list damaged segments instead of refusing them.
        fresh: fetch a bucket's objects again, in place of local copies.

    Raises:
        TraceError: not a trace set, or no such snapshot.
        TraceSchemaError: another version, or other columns.
        TraceCorruptError: damage, naming the file.
        StoreError: a bucket that cannot be read.
    """
    name, part = split_reference(reference)
    place = open_place(name)
    header = read_header(place)
    if part is not None and part.startswith("sha256:"):
        keys = read_snapshot(place, part)
    else:
        keys = place.keys(ROUNDS)
        if part is not None:
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
            damages.append(Damage(key, error.line, num_rows))

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
    return Listing(place, header, count_once(segments), tuple(damages))


def count_once(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments in order of their names, each with the prompts that an earlier segment owns."""
    earlier: set[str] = set()
    counted = []
    for segment in sorted(segments, key=lambda one: one.name):
        prompts = frozenset(segment.record.prompt_ids)
        counted.append(replace(segment, repeats=prompts & earlier))
        earlier |= prompts
    return tuple(counted)


def _read_segment(place: Place, file: StoredFile, *, fresh: bool) -> Segment:
    import pyarrow.parquet as pq

    where = place.at(file.key)
    path = local_file(place, file, fresh=fresh)
    with decoding(where):
        footer = pq.read_metadata(path)
    metadata = footer.metadata or {}
    found = metadata.get(b"specctl.schema_id", b"none").decode(errors="replace")
    if found != schema_id("rounds"):
        known = schema_id("rounds")[:19]
        raise TraceSchemaError(f"{where} has schema {found[:19]}…, not {known}…", hint=NEWER)
    record = parse_record(where, metadata.get(RECORD_KEY, b""), SegmentRecord)
    size = path.stat().st_size + (record.nodes.size_bytes if record.nodes else 0)
    return Segment(PurePosixPath(file.key).stem, record, footer.num_rows, size)


# --------------------------------------------------------------------------- snapshots


def snapshot_text(segments: Iterable[Segment]) -> bytes:
    """The names of segments, which hold the digests of the rounds files; sorted, one a line."""
    return "\n".join(sorted(segment.name for segment in segments)).encode()


def snapshot_digest(segments: Iterable[Segment]) -> str:
    """`sha256:<hex>` of segments in any order, the identity of their rows."""
    return "sha256:" + hashlib.sha256(snapshot_text(segments)).hexdigest()


def snapshot_key(digest: str) -> str:
    return f"{SNAPSHOTS}/{digest.removeprefix('sha256:')}.txt"


def list_snapshots(place: Place) -> list[str]:
    """Digests of all snapshots of a set."""
    found = map(_SNAPSHOT_KEY.fullmatch, place.keys(SNAPSHOTS))
    return ["sha256:" + one["hex"] for one in found if one is not None]


def read_snapshot(place: Place, digest: str) -> list[str]:
    """Keys of the rounds files of a snapshot.

    Raises:
        TraceError: the set has no such snapshot.
        TraceCorruptError: its name is not the digest of its text.
    """
    where = place.at(snapshot_key(digest))
    try:
        content = place.read(snapshot_key(digest))
    except KeyAbsentError as error:
        raise TraceError(
            f"trace set {place.name} has no snapshot {digest}",
            hint="list them with `specctl traces snapshot TRACES --list`",
        ) from error
    if "sha256:" + hashlib.sha256(content).hexdigest() != digest:
        raise TraceCorruptError(
            f"{where} was altered: its name is not the digest of its bytes",
            hint="restore the file",
        )
    keys = [f"{ROUNDS}/{name}.parquet" for name in content.decode("ascii", "replace").split()]
    for key in keys:
        parse_segment_key(where, key)
    return keys


# --------------------------------------------------------------------------- sets as one


@dataclass(frozen=True)
class TraceSet:
    """One or more trace sets, read as one."""

    parts: tuple[Listing, ...]  # set by set

    def __repr__(self) -> str:
        names = ", ".join(part.place.name for part in self.parts)
        return f"TraceSet({names!r}, {len(self.prompt_ids)} prompts)"

    @classmethod
    def open(cls, *sets: str | Path, verify: bool = True, skip_damaged: bool = False) -> TraceSet:
        """Opens sets of one pair and sampling, as they are at this moment.

        Args:
            sets: folders or `s3://bucket/prefix`; `SET@sha256:<hex>` opens a snapshot.
            verify: digest every file and check the keys of all rows; else digest the rounds files
                and check sizes.
            skip_damaged: leave out damaged segments and list them in `damages`.

        Raises:
            TraceError: not a trace set, or no such snapshot.
            TraceSchemaError: another version, or other columns.
            TraceCorruptError: a file is missing, truncated or altered, or a row is repeated.
            TraceMismatchError: sets of different pairs or sampling, or with common prompts.
            StoreError: a bucket that cannot be read.
        """
        if not sets:
            raise UsageError("traces: none are named", hint="name a folder")
        parts = tuple(read_listing(name, verify=verify, skip_damaged=skip_damaged) for name in sets)
        for part in parts:
            check_equal(part.place, part.header, parts[0].header, SOURCE, _TOGETHER)
        _check_disjoint(parts)
        traces = cls(parts)
        if verify:
            name = " + ".join(part.place.name for part in parts)
            check_keys(f"trace set {name}", traces.segment_files, traces.prompt_ids)
        return traces

    @property
    def header(self) -> TraceHeader:
        """The first set's; pair, sampling and token mode are equal in all."""
        return self.parts[0].header

    @property
    def headers(self) -> tuple[TraceHeader, ...]:
        """Set by set."""
        return tuple(part.header for part in self.parts)

    @cached_property
    def prompt_ids(self) -> tuple[str, ...]:
        """Sorted."""
        return tuple(sorted(prompt for part in self.parts for prompt in part.prompt_ids))

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the rows: the digest of their snapshot."""
        return snapshot_digest(segment for part in self.parts for segment in part.segments)

    @property
    def snapshots(self) -> tuple[str, ...]:
        """`sha256:<hex>` of each set's own snapshot, set by set."""
        return tuple(part.digest for part in self.parts)

    @property
    def damages(self) -> tuple[Damage, ...]:
        """Segments that `open` left out."""
        return tuple(damage for part in self.parts for damage in part.damages)

    @property
    def fingerprint(self) -> PairFingerprint:
        """The pair behind the traces.

        Raises:
            TraceMismatchError: collected without a drafter.
        """
        from specctl.artifacts.manifest import PairFingerprint

        header = self.header
        if header.drafter_digest is None:
            raise TraceMismatchError(
                "these traces come from plain decoding, without a drafter",
                hint="collect again with --drafter",
            )
        return PairFingerprint(
            target_digest=header.target_digest,
            drafter_digest=header.drafter_digest,
            tokenizer_digest=header.tokenizer_digest,
            target=str(header.collect.get("target", "unnamed")),
            drafter=str(header.collect.get("drafter", "unnamed")),
        )

    def scan(self, table: str) -> pl.LazyFrame:
        """The rows of `rounds` or `nodes`, lazily.

        `specctl.logs.parquet.collected` reads them and refuses files that cannot be decoded; the
        frame's own `collect` raises errors of polars.
        """
        check_choice("table", table, TABLES)
        return scan_files(table, [files[table] for files in self.segment_files if table in files])

    def num_rows(self, table: str) -> int:
        """Rows of a table, from the footers."""
        import pyarrow.parquet as pq

        paths = [files[table] for files in self.segment_files if table in files]
        return sum(pq.read_metadata(path).num_rows for path in paths)

    def summary(self) -> dict[str, Any]:
        """Counts: segments, prompts, repeats, requests, rounds, nodes, bytes."""
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
            **{f"num_{name}": self.num_rows(name) for name in TABLES},
            **collected(rounds).row(0, named=True),
            "size_bytes": sum(one.size_bytes for part in self.parts for one in part.segments),
        }

    @cached_property
    def segment_files(self) -> list[dict[str, Path]]:
        """The files of each segment by table, nodes in the order of their rounds.

        Segments without rows are absent; segments with repeated prompts are copied without them.
        """
        found = [
            self._without_repeats(part, segment) if segment.repeats else part.paths(segment)
            for part in self.parts
            for segment in part.segments
        ]
        return [paths for paths in found if paths]

    def _without_repeats(self, part: Listing, segment: Segment) -> dict[str, Path]:
        """Temporary files with the rows of a segment less its repeated prompts."""
        import pyarrow.parquet as pq

        copies = {}
        for table, rows in drop_prompts(part.tables(segment), segment.repeats).items():
            if len(rows):
                copies[table] = self._scratch / f"{table}-{uuid.uuid4().hex}.parquet"
                pq.write_table(rows, copies[table])
        return copies

    @cached_property
    def _scratch(self) -> Path:
        """A folder that lives as long as the process, since readers keep paths of it."""
        folder = Path(tempfile.mkdtemp(prefix="specctl-traces-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder


def _check_disjoint(parts: Sequence[Listing]) -> None:
    """Refuses a prompt in two sets, whose rounds would have equal keys."""
    owner: dict[str, Listing] = {}
    for part in parts:
        for prompt in part.prompt_ids:
            first = owner.setdefault(prompt, part)
            if first is not part:
                raise TraceMismatchError(
                    f"trace sets {first.place.name} and {part.place.name} both hold prompt "
                    f"{prompt!r}",
                    hint="name one of these sets",
                )


# --------------------------------------------------------------------------- domain


def hardware_of(traces: TraceSet) -> tuple[str, ...] | None:
    """The machines of all sets; None if one names none."""
    machines = [_recorded_domain(header).hardware for header in traces.headers]
    found = tuple(sorted({name for names in machines for name in names or ()}))
    return None if None in machines else found


def domain_of(traces: TraceSet) -> Domain:
    """The domain of traces, from headers and rows.

    Hardware lists the machines of all sets; any other field that differs between sets is unknown.
    Batch sizes are of live rows, since a dense position belongs to one request.

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
    merged["hardware"] = hardware_of(traces)
    is_live = pl.col("kind").cast(pl.String) == "live"
    batch_sizes = pl.col("batch_size").filter(is_live)
    for column in (batch_sizes, pl.col("context_tokens")):
        ends = traces.scan("rounds").select(low=column.min(), high=column.max())
        low, high = collected(ends).row(0)
        merged[column.meta.output_name()] = None if low is None else Range(low=low, high=high)
    return Domain(**merged)


def _recorded_domain(header: TraceHeader) -> Domain:
    """The domain of a header; without one, its number format alone."""
    from pydantic import ValidationError

    from specctl.artifacts import Domain

    stated = header.collect.get("domain") or {"dtype": header.collect.get("dtype")}
    try:
        return Domain.model_validate_json(canonical_json(stated))
    except ValidationError as error:
        raise TraceSchemaError(
            "trace.json: collect.domain breaks docs/artifact-format.md (domain): "
            f"{describe_violation(error)}",
            hint=NEWER,
        ) from error
