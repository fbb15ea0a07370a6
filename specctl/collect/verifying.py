"""Verification of a trace set, which reports all damage at once, and its snapshots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specctl.errors import TraceError
from specctl.formatting import count
from specctl.logs.row_checks import RowError, broken_rows, check_keys, check_rows
from specctl.logs.trace_files import NODES, ROUNDS, Segment
from specctl.logs.trace_set import (
    Damage,
    Listing,
    TraceSet,
    count_once,
    list_snapshots,
    read_listing,
    read_snapshot,
    snapshot_key,
    snapshot_text,
)
from specctl.progress import advance, progress
from specctl.stores.creating import ensure


@dataclass(frozen=True)
class SetCheck:
    """The state of a set; the fields of `traces verify --json`."""

    name: str  # with the snapshot, if one was named
    num_segments: int
    num_prompts: int
    num_repeats: int  # prompts that an earlier segment has too
    num_rows: int
    size_bytes: int
    num_snapshots: int
    num_orphans: int  # nodes files without a rounds file: a writer died, or is about to publish
    num_missing_rows: int  # of both tables, in damaged segments with a readable footer
    damages: tuple[Damage, ...]

    @property
    def is_whole(self) -> bool:
        return not self.damages

    def to_json(self) -> dict[str, Any]:
        return {"is_whole": self.is_whole, **asdict(self)}

    def render(self) -> str:
        """The state in words."""
        lines = [
            f"{self.name}: {count(self.num_segments, 'segment')} of "
            f"{count(self.num_prompts, 'prompt')}, {count(self.num_rows, 'row')}, "
            f"{self.size_bytes / 1e6:.1f} MB, {count(self.num_repeats, 'repeat')}, "
            f"{count(self.num_snapshots, 'snapshot')}, "
            f"{count(self.num_orphans, 'nodes file')} without a segment",
            *(f"damaged: {damage.reason}" for damage in self.damages),
        ]
        if self.damages:
            lines.append(
                f"{count(self.num_missing_rows, 'row')} or more cannot be used; restore the "
                "files, or freeze the rest with `specctl traces snapshot TRACES --skip-damaged`"
            )
        return "\n".join(lines)


def verify(name: str | Path) -> SetCheck:
    """Reads every byte and every row; from a bucket the objects, not local copies.

    Args:
        name: a set; with `@sha256:<hex>`, the segments of a snapshot.

    Raises:
        TraceError: no trace set, or a header or snapshot that cannot be read.
        StoreError: a bucket that cannot be read.
    """
    with progress("segments", None):
        listing = read_listing(name, skip_damaged=True, fresh=True)
        damages, whole = [*listing.damages], []
        for segment in listing.segments:
            try:
                check_segment(listing, segment)
            except TraceError as error:
                damages.append(Damage(segment.key, error.line, segment.num_rows))
            else:
                whole.append(segment)
            advance("segments")
    traces = TraceSet((Listing(listing.place, listing.header, count_once(whole)),))
    try:
        check_keys(f"trace set {name}", traces.segment_files, traces.prompt_ids)
    except TraceError as error:
        damages.append(Damage(ROUNDS, error.line, 0))
    is_whole_set = "@sha256:" not in str(name)
    snapshots = list_snapshots(listing.place) if is_whole_set else []
    orphans = set(listing.place.keys(NODES)) if is_whole_set else set()
    present = set(listing.place.keys(ROUNDS))
    for digest in snapshots:
        try:
            lost = [key for key in read_snapshot(listing.place, digest) if key not in present]
        except TraceError as error:
            damages.append(Damage(f"snapshot {digest}", error.line, 0))
            continue
        reason = f"snapshot {digest[:19]}… names {{}}, which is gone; restore the file"
        damages += [Damage(key, reason.format(listing.place.at(key))) for key in lost]
    named = {segment.record.nodes.key for segment in listing.segments if segment.record.nodes}
    return SetCheck(
        name=str(name),
        num_segments=len(listing.segments),
        num_prompts=len(listing.prompt_ids),
        num_repeats=listing.num_repeats,
        num_rows=sum(segment.num_rows for segment in listing.segments),
        size_bytes=sum(segment.size_bytes for segment in listing.segments),
        num_snapshots=len(snapshots),
        num_orphans=len(orphans - named),
        num_missing_rows=sum(damage.num_rows or 0 for damage in damages),
        damages=tuple(damages),
    )


def check_segment(listing: Listing, segment: Segment) -> None:
    """Checks all rows of a segment.

    Raises:
        TraceCorruptError: invalid rows, or a file that cannot be decoded.
    """
    import polars as pl

    tables = {name: pl.DataFrame(rows) for name, rows in listing.tables(segment).items()}
    found, nodes = len(tables.get("nodes", ())), segment.record.nodes
    stated = nodes.num_rows if nodes else 0
    try:
        if found != stated:
            raise RowError(f"{found} nodes, against {stated} in its record")
        check_rows(tables, segment.record.prompt_ids)
    except RowError as error:
        raise broken_rows(listing.place.at(segment.key), error) from error


# --------------------------------------------------------------------------- snapshots


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a set: the names of its segments at one moment, stored by their digest."""

    digest: str
    reference: str  # opens it
    num_segments: int
    num_prompts: int
    num_repeats: int
    damages: tuple[Damage, ...]  # segments that it leaves out

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        """The snapshot in words."""
        held = f"{count(self.num_segments, 'segment')} of {count(self.num_prompts, 'prompt')}"
        lines = [f"{held}:", self.reference, *(f"left out: {one.reason}" for one in self.damages)]
        if self.damages:
            rows = sum(damage.num_rows or 0 for damage in self.damages)
            unknown = sum(damage.num_rows is None for damage in self.damages)
            more = f", and an unknown number in {count(unknown, 'segment')}" if unknown else ""
            lines.append(f"missing: {count(rows, 'row')}{more}")
        return "\n".join(lines)


def take_snapshot(listing: Listing) -> Snapshot:
    """Stores a snapshot of a listing; a second call changes nothing.

    Raises:
        StoreError: the place cannot be written.
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
