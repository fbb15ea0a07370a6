"""Snapshots of a trace set: its segments at one moment, under a name of their own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specctl.formatting import count
from specctl.logs.trace_set import Damage, Listing, snapshot_key, snapshot_text
from specctl.stores.creating import ensure


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
        lines = [f"{held}:", self.reference, *(f"left out: {one.reason}" for one in self.damages)]
        if self.damages:
            rows = sum(damage.num_rows or 0 for damage in self.damages)
            unknown = sum(damage.num_rows is None for damage in self.damages)
            more = f", and an unknown number in {count(unknown, 'segment')}" if unknown else ""
            lines.append(f"missing: {count(rows, 'row')}{more}")
        return "\n".join(lines)


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
