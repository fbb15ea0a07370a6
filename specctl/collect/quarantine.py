"""What is known to be damaged: notes beside the data, which nothing moves and nothing deletes."""

from __future__ import annotations

from datetime import UTC, datetime

from specctl.collect.header import Digest, TraceRecord, parse_record
from specctl.collect.logs import Damage
from specctl.collect.places import QUARANTINE, Place
from specctl.stores import KeyTakenError, create


class Quarantined(TraceRecord):
    """A commit that readers leave out."""

    commit: Digest
    what: str
    reason: str
    num_rows: int
    created: str

    @property
    def damage(self) -> Damage:
        return Damage(self.what, f"in quarantine since {self.created}", self.commit, self.num_rows)


def read_quarantine(place: Place) -> dict[str, Quarantined]:
    """By digest of the commit.

    Raises:
        TraceError: a note that is damaged itself.
    """
    notes = [parse_record(place.at(k), place.read(k), Quarantined) for k in place.keys(QUARANTINE)]
    return {note.commit: note for note in notes}


def put_in_quarantine(place: Place, damage: Damage) -> None:
    """Notes that a commit's segment is damaged; one that is noted already is fine.

    Args:
        damage: with its commit.
    """
    assert damage.commit is not None
    note = Quarantined(
        commit=damage.commit,
        what=damage.what,
        reason=damage.reason,
        num_rows=damage.num_rows or 0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    try:
        create(place.store, _key(damage.commit), note.to_bytes())
    except KeyTakenError:  # noted before, or by another process just now
        return


def release(place: Place, commit: str) -> None:
    """Removes the note of a commit whose files are whole again."""
    place.store.delete(_key(commit))


def _key(commit: str) -> str:
    return f"{QUARANTINE}/{commit.removeprefix('sha256:')}.json"
