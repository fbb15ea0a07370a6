"""New sets from old ones: several merged, or one with larger or smaller segments. And snapshots."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from specctl.collect.trace_writer import TraceWriter
from specctl.formatting import count
from specctl.logs.parquet import Tables, decoding, drop_prompts, join_tables
from specctl.logs.row_checks import RowError, broken_rows, check_rows
from specctl.logs.trace_files import JOINED, PAIR_FIELDS, Segment, TraceHeader, check_equal
from specctl.logs.trace_set import (
    Damage,
    Listing,
    read_listing,
    snapshot_key,
    snapshot_text,
)
from specctl.stores.creating import ensure
from specctl.trace import arrow_schema

SEGMENT_ROWS = 2_000_000


def missing_lines(damages: Sequence[Damage]) -> list[str]:
    """The segments left out, for a person: a line each, and a sum."""
    if not damages:
        return []
    rows = sum(damage.num_rows or 0 for damage in damages)
    unknown = sum(damage.num_rows is None for damage in damages)
    more = f", and an unknown number in {count(unknown, 'segment')}" if unknown else ""
    found = [f"left out: {damage.reason}" for damage in damages]
    return [*found, f"missing: {count(rows, 'row')}{more}"]


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was taken.

    Attributes:
        reference: opens it. damages: segments that it leaves out.
    """

    digest: str
    reference: str
    num_segments: int
    num_prompts: int
    num_repeats: int
    damages: tuple[Damage, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        """For a person."""
        held = f"{count(self.num_segments, 'segment')} of {count(self.num_prompts, 'prompt')}"
        return "\n".join([f"{held}:", self.reference, *missing_lines(self.damages)])


def take_snapshot(listing: Listing) -> Snapshot:
    """Stores the names of the segments of a listing. Taking a snapshot twice is the same.

    Raises:
        StoreError: it cannot be stored.
    """
    digest = listing.digest
    ensure(listing.place.store, snapshot_key(digest), snapshot_text(listing.segments))
    return Snapshot(
        digest=digest,
        reference=f"{listing.place.name}@{digest}",
        num_segments=len(listing.segments),
        num_prompts=len(listing.prompt_ids),
        num_repeats=listing.num_repeats,
        damages=listing.damages,
    )


@dataclass
class Rewrite:
    """A set that was written from others.

    Attributes:
        num_repeats: times that a prompt was left out because an earlier segment has it.
        damages: of the sources, where they were to be skipped.
    """

    out: str
    num_prompts: int = 0
    num_segments: int = 0
    num_repeats: int = 0
    damages: tuple[Damage, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        """For a person."""
        line = (
            f"{count(self.num_prompts, 'prompt')} written to {self.out} in "
            f"{count(self.num_segments, 'segment')}"
        )
        if self.num_repeats:
            line += f", {count(self.num_repeats, 'repeat')} left out"
        return "\n".join([line, *missing_lines(self.damages)])


def rewrite(
    sources: Sequence[str],
    out: str,
    *,
    resume: bool = False,
    segment_rows: int = SEGMENT_ROWS,
    skip_damaged: bool = False,
    on_prompts: Callable[[int], None] | None = None,
) -> Rewrite:
    """Writes the rows of sets into a new one; of prompts that several hold the first counts.

    The header names the machines of all. Segments keep the policy that they were collected with.

    Args:
        sources: folders or URLs, with `@sha256:<hex>` for snapshots.
        resume: go on with a set that was begun from the same sources.
        segment_rows: of a segment, about; all of them are in memory at once.
        skip_damaged: leave out damaged segments of the sources.

    Raises:
        TraceMismatchError: another pair, sampling, treatment of tokens or configuration.
        TraceCorruptError: damage. OutputError, StoreError: as `TraceWriter.open`.
    """
    listings = [read_listing(source, skip_damaged=skip_damaged) for source in sources]
    header = merged_header(listings)
    done = Rewrite(
        out,
        num_repeats=sum(listing.num_repeats for listing in listings),
        damages=tuple(damage for listing in listings for damage in listing.damages),
    )
    with TraceWriter.open(out, header, resume=resume) as writer:
        for group in _groups(_wanted(listings, writer, done), segment_rows):
            prompts = [prompt for part in group for prompt in part.prompt_ids]
            texts: dict[str, str] = {}
            for part in group:
                texts = part.segment.texts | texts
            rows = join_tables([part.tables for part in group])
            writer.commit(prompts, rows, texts=texts, policy=group[0].segment.record.policy)
            done.num_prompts += len(prompts)
            done.num_segments += 1
            if on_prompts is not None:
                on_prompts(len(prompts))
    return done


class _Part(NamedTuple):
    """Prompts that the new set lacks, with all their rows, and the segment that finishes them."""

    segment: Segment
    prompt_ids: list[str]
    tables: Tables


def _wanted(listings: Sequence[Listing], writer: TraceWriter, done: Rewrite) -> Iterator[_Part]:
    """The rows to write, in the order of all segments; repeats between sets are counted."""

    def counted(listing: Listing) -> Iterator[tuple[Segment, Listing]]:
        return ((segment, listing) for segment in listing.segments)

    seen: set[str] = set()
    for segment, listing in heapq.merge(*map(counted, listings), key=lambda found: found[0].name):
        first = [prompt for prompt in segment.prompt_ids if prompt not in seen]
        done.num_repeats += len(segment.prompt_ids) - len(first)
        seen.update(first)
        wanted = writer.pending(first)
        if wanted:
            rows = checked_tables(listing, segment)
            without = set(segment.record.prompt_ids) - set(wanted)
            yield _Part(segment, wanted, drop_prompts(rows, without) if without else rows)


def checked_tables(listing: Listing, segment: Segment) -> Tables:
    """All rows of a segment, after every check of rows.

    Raises:
        TraceCorruptError: rows that no writer wrote, or a file that cannot be decoded.
    """
    import polars as pl

    where = listing.place.at(segment.key)
    tables = listing.tables(segment)
    have = {table: len(rows) for table, rows in tables.items()}
    try:
        nodes = segment.record.nodes
        if have.get("nodes", 0) != (nodes.num_rows if nodes else 0):
            raise RowError(f"{have.get('nodes', 0)} nodes, where its record says otherwise")
        check_rows(
            {table: pl.DataFrame(rows) for table, rows in tables.items()},
            segment.record.prompt_ids,
        )
    except RowError as error:
        raise broken_rows(where, error) from error
    with decoding(where):
        return {table: rows.cast(arrow_schema(table)) for table, rows in tables.items()}


def _groups(parts: Iterable[_Part], segment_rows: int) -> Iterator[list[_Part]]:
    """Consecutive parts of one policy, of about so many rows together."""
    group: list[_Part] = []
    for part in parts:
        num_rows = sum(len(rows) for one in (*group, part) for rows in one.tables.values())
        policies = [one.segment.record.policy for one in (*group[:1], part)]
        if group and (num_rows > segment_rows or policies[0] != policies[-1]):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def merged_header(listings: Sequence[Listing]) -> TraceHeader:
    """The header of several sets as one; they may differ in policies and in machines.

    Raises:
        TraceMismatchError: naming another field that differs.
    """
    alike = [_on_hardware(listing.header, None) for listing in listings]
    tokens_fix = (
        "join sets whose token ids were treated alike; to have such, collect one of them again "
        "with the --tokens and --token-key of the other"
    )
    for listing, header in zip(listings, alike, strict=True):
        check_equal(listing.place, header, alike[0], ["collect.tokens"], tokens_fix)
        fix = "join sets of one pair, sampling and configuration, and keep others apart"
        check_equal(listing.place, header, alike[0], [*PAIR_FIELDS, *JOINED], fix)
    domains = [listing.header.collect.get("domain") for listing in listings]
    machines: list[Any] = [
        domain.get("hardware") if isinstance(domain, dict) else None for domain in domains
    ]
    if any(names is None for names in machines):
        return alike[0]  # some of the rows are of a machine that nothing names
    return _on_hardware(alike[0], sorted({name for names in machines for name in names}))


def _on_hardware(header: TraceHeader, names: list[str] | None) -> TraceHeader:
    domain = header.collect.get("domain")
    if not isinstance(domain, dict):
        return header
    changed = {
        **header.model_dump(),
        "collect": {**header.collect, "domain": {**domain, "hardware": names}},
    }
    return TraceHeader.model_validate(changed)
