"""Where a trace set lives: a folder or a bucket, by one set of keys.

trace.json                        the header
commits/<writer>/<seq>.json       commit records, a log for each writer
data/<table>-<sha256>.parquet     segments
snapshots/<sha256>.txt            frozen lists of commits
quarantine/<sha256>.json          commits that are known to be damaged
tmp/                              unfinished files of a folder; never read
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import UsageError
from specctl.stores import KeyAbsentError, ObjectStore, is_store_url, open_store, probe
from specctl.stores.creating import read
from specctl.stores.local import TEMPORARY, LocalStore

HEADER_NAME = "trace.json"
COMMITS, DATA, SNAPSHOTS, QUARANTINE = "commits", "data", "snapshots", "quarantine"
FOLDERS = frozenset({COMMITS, DATA, SNAPSHOTS, QUARANTINE, TEMPORARY})
MAX_RECORD_BYTES = 64 << 20
"""Of a header, commit, snapshot or quarantine record."""
_REFERENCE = re.compile(r"(?P<place>.+)@(?P<snapshot>sha256:[0-9a-f]{64})\Z", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """A trace set's store.

    Attributes:
        root: the folder, None where the set is in a bucket.
        name: what the user called it.
    """

    store: ObjectStore
    root: Path | None
    name: str

    def at(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self.name.rstrip('/')}/{key}"

    def read(self, key: str) -> bytes:
        """The bytes of a record.

        Raises:
            StoreError: none there (`KeyAbsentError`), too many, or none to be had.
        """
        return read(self.store, key, max_bytes=MAX_RECORD_BYTES)

    def holds(self, key: str) -> bool:
        """Whether there is a record under a key."""
        try:
            self.read(key)
        except KeyAbsentError:
            return False
        return True

    def keys(self, prefix: str) -> list[str]:
        """Keys below a prefix, sorted; others may be appearing."""
        return [found.key for found in self.store.objects(prefix)]


def open_place(place: str | Path) -> Place:
    """A folder, `file:///folder` or `s3://bucket/prefix`; nothing is read yet.

    Raises:
        UsageError: another kind of URL, or a package that it needs is missing.
    """
    text = str(place)
    if not is_store_url(text):
        return Place(LocalStore(text), Path(text), text)
    store = open_store(text)
    return Place(store, store.root if isinstance(store, LocalStore) else None, text)


def probe_bucket(place: Place) -> None:
    """Before anything is written to a bucket: a folder creates exclusively by itself.

    Raises:
        StoreError: it overwrites what is there, or cannot be written.
    """
    if place.root is None:
        probe(place.store)


def check_outside(name: str, key_file: Path) -> None:
    """Refuses a key inside the set whose tokens it hides: who gets the set would get it too.

    Args:
        name: a folder or a URL.

    Raises:
        UsageError: the file lies, or would lie, below the folder.
    """
    root = open_place(name).root
    if root is not None and key_file.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            f"--token-key {key_file}",
            expected="a file outside of the trace set",
            found=f"one in {root}",
            fix="keep it where the set is not shared from",
        )


def enclosing_set(path: Path) -> Path | None:
    """The trace set that a path lies in, at any depth; a set does not lie in itself."""
    above = (folder for folder in path.resolve().parents if (folder / HEADER_NAME).is_file())
    return next(above, None)


def split_reference(reference: str | Path) -> tuple[str, str | None]:
    """`TRACES` or `TRACES@sha256:<hex>`: the place, and the snapshot that is meant."""
    found = _REFERENCE.fullmatch(str(reference))
    return (str(reference), None) if found is None else (found["place"], found["snapshot"])
