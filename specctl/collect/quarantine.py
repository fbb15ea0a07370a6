"""What is known to be damaged: notes beside the data, which nothing moves and nothing deletes.

A note is named by its commit, and that alone is what leaves the commit out: a note that cannot be
read leaves it out all the same, and makes no other commit unusable.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field

from specctl.collect.chains import Damage
from specctl.collect.commits import Commit, Count
from specctl.collect.places import QUARANTINE, Place
from specctl.collect.records import Digest, Moment, TraceRecord, parse_record
from specctl.errors import StoreError, TraceCorruptError, TraceError
from specctl.stores import KeyAbsentError, KeyTakenError, create

_KEY = re.compile(rf"{QUARANTINE}/(?P<hex>[0-9a-f]{{64}})\.json")
_AGAIN = "run `specctl traces verify TRACES --quarantine`, which writes it anew or takes it back"


class Quarantined(TraceRecord):
    """A commit that readers leave out."""

    commit: Digest
    what: Annotated[str, Field(pattern=r"^[ -~]{1,300}$")]
    reason: str
    num_rows: Count
    created: Moment


Notes = dict[str, Quarantined | TraceError | StoreError]
"""By digest of the commit its note, or why that cannot be read."""


def read_quarantine(place: Place) -> Notes:
    """All notes; other files are no notes, see `note_damages`."""
    found = (_KEY.fullmatch(key) for key in place.keys(QUARANTINE))
    digests = ["sha256:" + one["hex"] for one in found if one is not None]
    notes = ((digest, _read(place, digest)) for digest in digests)
    return {digest: note for digest, note in notes if note is not None}


def _read(place: Place, commit: str) -> Quarantined | TraceError | StoreError | None:
    """None where it was taken back just now."""
    where = place.at(_key(commit))
    try:
        note = parse_record(where, place.read(_key(commit)), Quarantined, fix=_AGAIN)
    except KeyAbsentError:
        return None
    except (TraceError, StoreError) as error:
        return error
    if note.commit != commit:
        return TraceCorruptError(
            where, expected=commit, found=f"a note of {note.commit}", fix=_AGAIN
        )
    return note


def quarantined(commit: Commit, notes: Notes) -> Damage:
    """The damage of a commit that has a note; its rows by its own word, not by the note's."""
    note = notes[commit.digest]
    if isinstance(note, Quarantined):
        return Damage(
            note.what, f"in quarantine since {note.created}", commit.digest, commit.num_rows
        )
    reason = "in quarantine, by a note that cannot be read"
    return Damage(_key(commit.digest), reason, commit.digest, commit.num_rows)


def note_damages(place: Place) -> list[Damage]:
    """Notes that cannot be read, and files that are none."""
    found = [
        Damage(_key(commit), str(note), num_rows=0)
        for commit, note in read_quarantine(place).items()
        if not isinstance(note, Quarantined)
    ]
    for key in place.keys(QUARANTINE):
        if not _KEY.fullmatch(key):
            reason = f"{place.at(key)}: expected {QUARANTINE}/<sha256>.json, found another name; "
            found.append(Damage(key, reason + "remove it; nothing of ours creates such files"))
    return found


def put_in_quarantine(place: Place, damage: Damage) -> None:
    """Notes that a commit's segment is damaged; one that is noted already is fine.

    Args:
        damage: with its commit.
    """
    assert damage.commit is not None
    if not isinstance(_read(place, damage.commit), Quarantined | None):
        release(place, damage.commit)  # what is there tells nothing
    note = Quarantined(
        commit=damage.commit,
        what=damage.what,
        reason=damage.reason,
        num_rows=damage.num_rows or 0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    ).sealed()
    try:
        create(place.store, _key(damage.commit), note.to_bytes())
    except KeyTakenError:  # noted before, or by another process just now
        return


def release(place: Place, commit: str) -> None:
    """Removes the note of a commit."""
    place.store.delete(_key(commit))


def _key(commit: str) -> str:
    return f"{QUARANTINE}/{commit.removeprefix('sha256:')}.json"
